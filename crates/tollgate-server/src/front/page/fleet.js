// All servers on one store: who is up, what each decides, and whether they have the same limits.

import { notice } from "./alerts.js";
import { $, each, fill, h, put } from "./nodes.js";
import { latency, plural, rate, span } from "./words.js";

const faint = (words) => h("span.faint", words);

function makeRow() {
  const cells = ["td.all", "td.num", "td.num", "td.num", "td.num", "td", "td"].map((what) => h(what));
  ["up for", "allowed/s", "denied/s", "p99", "limits", "store"].forEach((label, index) => cells[index + 1].setAttribute("data-l", label));
  return h("tr", cells);
}

/** A server names the first eight of them. */
const fallbackWords = (limits) => `fallback: ${limits.slice(0, 2).join(", ")}${limits.length > 2 ? ` and ${limits.length > 7 ? "more" : limits.length - 2}` : ""}`;

/** What all of them decide together. The slowest p99 is that of no request in particular, so there is none. */
function showAll(servers) {
  const sum = (of) => servers.reduce((total, server) => total + of(server), 0);
  const [allowed, denied] = [sum((server) => server.allowed + server.would_deny), sum((server) => server.denied)];
  $("fleet-all").hidden = servers.length < 2;
  fill($("fleet-all"), [allowed, denied], () => h("tr", h("td.all", h("b", "all together")), h("td.hide-small"),
    h("td.num", { "data-l": "allowed/s" }, h("b", rate(allowed))), h("td.num", { "data-l": "denied/s" }, denied > 0 ? h("b.deny", rate(denied)) : faint("0")),
    h("td.hide-small"), h("td.hide-small"), h("td.hide-small")));
}

export function showFleet({ servers, fleet_stale: isStale, store, second }) {
  const isShared = store.mode !== "memory";
  $("servers").hidden = !isShared;
  put($("servers"), isStale ? "servers not known" : plural(servers.length, "server"));
  $("fleet").hidden = !isShared;
  put($("fleet-words"), isStale ? "the store does not answer, so only this one is known" : `${plural(servers.length, "server")} on this store; one that is gone disappears within seconds`);
  const revisions = new Set(servers.map(({ config }) => config));
  notice("revisions", "Servers on this store have different limits.",
    revisions.size > 1 ? servers.map(({ name, config, limits }) => `${name}: ${config}, ${plural(limits, "limit")}`).join("\n") : null, { isAmber: true });
  showAll(servers);
  each($("fleet-rows"), servers, ({ name, since }) => `${name} ${since}`, makeRow, (row, server) => {
    const [name, up, allowed, denied, p99, config, state] = row.cells;
    fill(name, [server.name, server.this, server.draining], () => [h("b.mono", server.name), " ", server.this && faint("this one "), server.draining && h("span.tag.warn", "draining")]);
    put(up, span(Math.max(1, second - server.since) * 1000));
    put(allowed, rate(server.allowed + server.would_deny));
    fill(denied, server.denied, () => (server.denied > 0 ? h("b.deny", rate(server.denied)) : faint("0")));
    put(p99, server.p99_ns === null ? "–" : latency(server.p99_ns));
    fill(config, [server.config, server.limits], () => [h("span.mono", server.config), faint(` ${plural(server.limits, "limit")}`)]);
    fill(state, [server.store, server.fallback], () => (server.fallback.length ? h("span.tag.warn.wraps", fallbackWords(server.fallback)) : server.store === "up" ? faint("up") : h("span.tag.warn", server.store)));
  });
}
