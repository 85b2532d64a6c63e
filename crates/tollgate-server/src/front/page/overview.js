// The overview: all limits as rows, those that deny first; a row opens in place to its chart and to the keys with most denials.

import { chart, legend, meter, numbers } from "./chart.js";
import { saveCsv } from "./csv.js";
import { showFleet } from "./fleet.js";
import { RANGES, isIdle, now, ranged, rangedAll, remember } from "./limits.js";
import { $, attribute, copy, each, fill, h, make, put } from "./nodes.js";
import { choose, offer } from "./try.js";
import { clockTime, dateTime, latency, number, percent, plural, policyWords, rate, ruleWords, span } from "./words.js";

const FOLDS_FROM = 11; // with fewer limits, idle ones are rows like others
const NEAR = 0.8; // of its limit, a key is near it
const MOST_BY_SERVER = 20; // a server with fewer busy limits has named all of them, however long their names
const SORTED_EVERY_MS = 5000; // rows that change places all the time cannot be read

let last = null; // the last snapshot
let range = "5m";
let isOfAll = false; // whether rates are those of all servers together
let rows = []; // what is known of each limit
let sorted = { by: "denied", isDown: true };
let shownChip = "all";
let order = new Map(); // the place of each limit, as it was sorted last
let sortedAt = 0;

// What is known of a limit.

/** A limit's rates on all servers together: allowed, denied, would be denied. Of a server that does not say, it is among the least busy. */
function ofAll(limit) {
  const each = last.servers.map((server) => ratesOn(server, limit) ?? [0, 0, 0]);
  return [0, 1, 2].map((kind) => each.reduce((sum, rates) => sum + rates[kind], 0));
}

/** A server says so of its busiest limits; of others it is not known. */
const ratesOn = ({ by_limit: rates }, limit) => (Object.hasOwn(rates, limit) ? rates[limit] : null) ?? (Object.keys(rates).length < MOST_BY_SERVER ? [0, 0, 0] : null);

/** Only what is decided now is known of other servers. */
const showsAll = () => isOfAll && range === "5m" && last.servers.length > 1;

function known(limit) {
  const name = limit.limit;
  const bars = ranged(name, range);
  const isNow = range === "5m";
  const together = showsAll() ? ofAll(name) : null;
  const mean = (kind) => bars.totals[kind] / bars.seconds;
  const of = (kind) => (together ? together[["allowed", "denied", "would_deny"].indexOf(kind)] : isNow ? now(name, kind) : mean(kind));
  const allowed = of("allowed");
  const denied = of("denied");
  const would = of("would_deny");
  const asked = allowed + denied + would;
  return {
    limit, name, bars, allowed, denied, would, isIdle: isIdle(bars) && asked === 0,
    mean: { allowed: mean("allowed"), denied: mean("denied"), would: mean("would_deny") }, // of the whole range, by which rows are sorted
    share: asked > 0 ? (denied + would) / asked : 0,
    fallsBack: now(name, "fell_back") > 0,
  };
}

const SORTS = {
  // By what the row shows, then by the whole range; shadow after what is truly denied.
  denied: { words: "denials first", of: (row) => (row.denied * 1e6 + row.mean.denied) * 1e6 + row.would + row.mean.would },
  allowed: { words: "allowed first", of: (row) => row.allowed },
  share: { words: "share denied", of: (row) => row.share },
  fullest: { words: "fullest key", of: (row) => row.limit.fullest ?? -1 },
  p99: { words: "slowest first", of: (row) => row.limit.p99_ns ?? -1 },
  name: { words: "name", of: (row) => row.name },
};

const CHIPS = {
  all: { words: "All", has: () => true },
  denying: { words: "Denying", has: (row) => row.mean.denied > 0 },
  near: { words: "Near the limit", has: (row) => row.mean.denied === 0 && row.mean.would === 0 && row.limit.fullest >= NEAR },
  fallback: { words: "Fallback", has: (row) => row.fallsBack },
  shadow: { words: "Shadow", has: (row) => row.limit.shadow },
  overrides: { words: "Overrides", has: (row) => row.limit.overrides > 0 },
};

function compare(one, other) {
  const { of } = SORTS[sorted.by];
  const [a, b] = [of(one), of(other)];
  const order = typeof a === "string" ? a.localeCompare(b) : b - a;
  return (sorted.isDown ? order : -order) || one.name.localeCompare(other.name);
}

/** Sorts now and then, but not under somebody's pointer or focus. */
function sortRows(isAsked) {
  const isNew = rows.some(({ name }) => !order.has(name));
  const isDue = Date.now() - sortedAt >= SORTED_EVERY_MS && !$("rows").matches(":hover, :focus-within");
  if (isAsked || isNew || isDue) {
    order = new Map(rows.toSorted(compare).map(({ name }, index) => [name, index]));
    sortedAt = Date.now();
  }
  rows.sort((one, other) => order.get(one.name) - order.get(other.name));
}

function isFound(row) {
  const text = $("filter").value.trim().toLowerCase();
  if (!text) return true;
  return row.name.includes(text) || row.limit.offenders.some(({ hash, key }) => hash.startsWith(text) || (key ?? "").toLowerCase().includes(text));
}

// A row.

/** Bands of outages and marks of what was changed, behind the bars of a row. */
function bandsOf({ t0, step, allowed }) {
  const total = step * allowed.length;
  const x = (time) => Math.max(0, Math.min(120, ((time - t0) / total) * 120));
  const seen = happenings().filter(({ from, to }) => (to ?? from) > t0 && from < t0 + total);
  return seen.map(({ kind, from, to }) => [kind, Number(x(from).toFixed(1)), Number((to ? Math.max(1.5, x(to) - x(from)) : 1).toFixed(1))]);
}

/** Bars without axes, on a scale of their own. */
function spark(bars) {
  const total = bars.allowed.map((one, index) => one + bars.denied[index] + bars.would_deny[index]);
  const most = Math.max(...total, 1e-9);
  const width = 120 / total.length;
  const path = (from, to) => total.map((_, index) => (to(index) > from(index) ? `M${(index * width).toFixed(1)} ${(22 - (from(index) / most) * 21).toFixed(1)}V${(22 - (to(index) / most) * 21).toFixed(1)}h${(width - 0.3).toFixed(1)}V${(22 - (from(index) / most) * 21).toFixed(1)}z` : "")).join("");
  const allowed = (index) => bars.allowed[index];
  const upper = (index) => bars.allowed[index] + bars.would_deny[index];
  return [path(() => 0, allowed), path(allowed, upper), path(upper, (index) => total[index])];
}

function makeRow({ name, limit }) {
  const button = h("button", { type: "button", "aria-expanded": "false", "aria-controls": `card-${name}` }, name);
  button.addEventListener("click", () => toggle(name));
  const row = h("tr.l", { id: `limit-${name}` },
    h("td.n", h("div.name", button, h("span.tags"))), h("td.pol", ruleWords(limit)),
    h("td.s", h("svg.spark", { viewBox: "0 0 120 22", preserveAspectRatio: "none", "aria-hidden": "true" }, h("g"), h("path.f1"), h("path", { fill: "url(#hd)" }), h("path.fd"))),
    h("td.num.a"), h("td.num.d"), h("td.num.r"), h("td.full"), h("td.num.p99"), h("td.c"));
  return row;
}

function tagsOf({ limit, fallsBack }) {
  const tags = [];
  if (limit.shadow) tags.push(["dash", "shadow"]);
  if (fallsBack) tags.push(["warn.only-small", `fallback: ${limit.fallback}`]); // a wide screen has a column for it
  if (limit.overrides > 0) tags.push(["info", plural(limit.overrides, "override")]);
  return tags;
}

function showRow(row, item) {
  const [name, policy, sparks, allowed, denied, share, full, p99, counted] = row.cells;
  fill(name.firstElementChild.children[1], tagsOf(item), () => tagsOf(item).map(([kind, words]) => h(`span.tag.${kind}`, words)));
  put(policy, ruleWords(item.limit));
  const [behind, ...paths] = sparks.firstElementChild.children;
  const bands = bandsOf(item.bars);
  fill(behind, bands, () => bands.map(([kind, from, width]) => h(kind === "w" ? "rect.band" : "rect.fi", { x: from, y: 0, width, height: 22 })));
  spark(item.bars).forEach((path, index) => attribute(paths[index], "d", path));
  put(allowed, rate(item.allowed));
  const isShadow = item.limit.shadow;
  const refused = isShadow ? item.would : item.denied;
  fill(denied, [refused, isShadow], () => (refused > 0 ? [h("b.deny", rate(refused)), isShadow && h("span.faint", " would")] : h("span.zero", "0")));
  attribute(denied, "data-u", refused === 0 ? `${rate(item.allowed)} allowed/s` : isShadow ? "would be denied/s" : "denied/s");
  fill(share, item.share, () => (item.share >= 0.05 ? h("b", percent(item.share)) : percent(item.share)));
  const { fullest, p99_ns: p99Ns } = item.limit;
  fill(full, fullest, () => (fullest === null ? h("span.zero", "–") : meter([["f2", fullest]], percent(fullest), `${percent(fullest)} of the limit used by the fullest key`, "meter short")));
  put(p99, p99Ns === null ? "–" : latency(p99Ns));
  fill(counted, [item.limit.store, item.fallsBack], () => (item.fallsBack ? h("span.tag.warn", `fallback: ${item.limit.fallback}`) : h("span.faint", item.limit.store === "memory" ? "here" : "remote")));
  row.classList.toggle("idle-row", item.isIdle);
}

// The card of a row that is open.

const open = new Map(); // by name: what the card consists of

function toggle(name) {
  const row = $(`limit-${name}`);
  const isOpen = open.has(name);
  row.querySelector("button").setAttribute("aria-expanded", String(!isOpen));
  row.classList.toggle("open", !isOpen);
  if (isOpen) {
    open.get(name).row.remove();
    open.delete(name);
    return;
  }
  const card = makeCard(name);
  open.set(name, card);
  row.after(card.row);
  showCard(card, rows.find((one) => one.name === name));
}

/** A command that charges a limit. A concurrency limit is reserved: a check would hold nothing that could be released. */
function curlLine({ limit, strategy }) {
  const [path, body] = strategy === "concurrency" ? ["/v1/reserve", { limit, key: "user:42", ttl_ms: 1000 }] : ["/v1/check", { limit, key: "user:42" }];
  return `curl -s ${location.origin}${path} -H 'content-type: application/json' -d '${JSON.stringify(body)}'`;
}

function makeCard(name) {
  const host = h("div");
  const details = h("details");
  const code = h("code");
  const copied = h("button.quiet.copy", { type: "button" }, "Copy");
  copied.addEventListener("click", () => copy(copied, code.textContent));
  const tries = h("button.quiet", { type: "button" }, "Try a key");
  tries.addEventListener("click", () => {
    $("try-limit").value = name;
    $("try-key").focus();
    $("try").scrollIntoView({ block: "center" });
  });
  const body = h("tbody");
  const table = h("table.table.dense.offenders", h("caption"), h("thead", h("tr", h("th", { scope: "col" }, "key"), h("th.num", { scope: "col" }, "times"), h("th.num", { scope: "col" }, "left"), h("th.num", { scope: "col" }, "resets in"))), body);
  const parts = {
    name, host, details, code, table, body, drawn: null, isDeniedOnly: false,
    nobody: h("p.faint.nobody"),
    servers: h("table.table.dense.by-server", h("caption", "By server"), h("thead", h("tr", h("th", { scope: "col" }, "server"), h("th.num", { scope: "col" }, "denied/s"), h("th.num", { scope: "col" }, "allowed/s"))), h("tbody")),
    empty: h("div.empty", h("p", "Nothing was asked in this time. Try:"), h("p.copyable", code, copied)),
    facts: h("p.wide", h("span.policy"), h("span.changed.faint"), tries),
    title: h("h3", "Requests a second"),
  };
  const only = h("button.quiet.end", { type: "button", "aria-pressed": "false" }, "Denied only");
  only.addEventListener("click", () => {
    parts.isDeniedOnly = !parts.isDeniedOnly;
    only.setAttribute("aria-pressed", String(parts.isDeniedOnly));
    showCard(parts, rows.find((one) => one.name === name));
  });
  parts.figure = h("div.left", h("header.row", parts.title, legend([["f1", "allowed"], ["fd", "denied"], ["hd", "would be denied"], ["w", "store down"], ["i", "reload"]]), only), host, details);
  parts.row = h("tr.card", { id: `card-${name}` }, h("td", { colspan: 9 }, h("div.cardgrid", h("div", parts.figure, parts.empty), h("div", parts.nobody, table, parts.servers), parts.facts)));
  numbers(details, () => parts.drawn);
  return parts;
}

/** Bands and marks of what happened to the store and to the config. */
function happenings() {
  const end = last.second;
  const troubles = last.troubles.map(({ from, to }) => ({ kind: "w", from, to: to ?? end, label: "store down", long: `store down from ${dateTime(from)}${to ? ` for ${span((to - from) * 1000)}` : ""}; limits fell back` }));
  const reloads = last.reloads.map(({ at, refused }) => ({ kind: "i", from: at, label: refused ? "reload refused" : "reload", long: refused ? "a changed config was refused" : "the config was read again" }));
  return [...troubles, ...reloads];
}

/** When a reload changed this limit last, and what. */
function changedWords(name) {
  for (const { at, changes } of last.reloads.toReversed()) {
    const change = changes.find((one) => one.slice(2).startsWith(`limit ${name}: `));
    if (change) return `${change.startsWith("+") ? "Added" : "Changed"} ${dateTime(at)}: ${change.slice(`~ limit ${name}: `.length).replace(" -> ", " → ")}.`;
  }
  return "";
}

function showCard(card, item) {
  if (!item) return;
  const { limit, bars } = item;
  card.figure.hidden = item.isIdle;
  card.empty.hidden = !item.isIdle;
  if (!item.isIdle) {
    card.chart ??= chart(card.host);
    card.drawn = {
      label: `Requests a second of ${item.name}, ${RANGES[range].words}`, t0: bars.t0, step: bars.step, height: 190, hasLane: true, events: happenings(), unit: "/s",
      series: [{ name: "allowed", kind: "f1", values: bars.allowed }, { name: "would be denied", kind: "hd", values: bars.would_deny }, { name: "denied", kind: "fd", values: bars.denied }].slice(card.isDeniedOnly ? 1 : 0),
    };
    card.chart.update(card.drawn);
  }
  put(card.code, curlLine(limit));
  put(card.facts.firstElementChild, `${policyWords(limit)}.`);
  put(card.facts.children[1], changedWords(item.name));
  showOffenders(card, limit);
  showServers(card, limit);
}

/** What each server on this store decides under a limit. */
function showServers(card, { limit, shadow }) {
  const { servers } = last;
  card.servers.hidden = servers.length < 2;
  if (servers.length < 2) return;
  put(card.servers.tHead.rows[0].cells[1], shadow ? "would be denied/s" : "denied/s");
  each(card.servers.tBodies[0], servers, ({ name, since }) => `${name} ${since}`, () => h("tr", h("td"), h("td.num"), h("td.num")), (row, server) => {
    const [name, denied, allowed] = row.cells;
    const rates = ratesOn(server, limit);
    const refused = rates && rates[shadow ? 2 : 1];
    fill(name, [server.name, server.this], () => [server.name, server.this && h("span.faint", " this one")]);
    fill(denied, refused, () => (refused > 0 ? h("b.deny", rate(refused)) : h("span.faint", rates ? "0" : "–")));
    put(allowed, rates ? rate(rates[0]) : "–");
  });
}

/** When a key is full again; one that was denied by the fallback has no such time. */
function resetWords({ capacity, reset_after_ms }, resetIn) {
  if (capacity === 0) return "never";
  if (reset_after_ms === 0) return "–";
  return resetIn > 0 ? span(Math.ceil(resetIn / 1000) * 1000) : "now";
}

function offenderRow(limit) {
  const button = make("button", "plain");
  button.type = "button";
  button.addEventListener("click", () => choose(limit, button));
  return h("tr", h("td", button, " ", h("a.faint", "open")), h("td.num.deny"), h("td.num"), h("td.num"));
}

function showOffenders(card, limit) {
  const { offenders } = limit;
  card.table.hidden = offenders.length === 0;
  card.nobody.hidden = offenders.length > 0;
  put(card.nobody, limit.shadow ? "Nobody would have been denied in the last 5 minutes." : "Nobody was denied in the last 5 minutes.");
  put(card.table.caption, limit.shadow ? "Would be denied most, last 5 minutes" : "Denied most, last 5 minutes");
  each(card.body, offenders.slice(0, 6), ({ hash }) => hash, () => offenderRow(card.name), (row, one) => {
    const [who, times, left, resets] = row.cells;
    const button = who.firstElementChild;
    const isKey = one.key !== null;
    button.dataset.hash = one.hash;
    button.dataset.key = one.key ?? "";
    if (button.textContent !== "Copied") put(button, isKey ? one.key : `${one.hash.slice(0, 12)}…`);
    // The page of a key takes the hash, so that no key is in an address.
    attribute(button.nextElementSibling, "href", `/key#${one.hash}`);
    attribute(button.nextElementSibling, "aria-label", `Open ${isKey ? one.key : one.hash.slice(0, 12)}`);
    attribute(button, "title", isKey ? "Try this key" : `Copy ${one.hash}, by which the log names this key`);
    put(times, rate(one.denials));
    const resetIn = one.last_denied * 1000 + one.reset_after_ms - last.second * 1000;
    put(left, resetIn > 0 && one.capacity > 0 ? `${rate(one.remaining)} of ${rate(one.capacity)}` : "–");
    put(resets, resetWords(one, resetIn));
  });
}

// The list.

function showHeads() {
  for (const head of $("heads").cells) {
    if (!head.dataset.by) continue;
    const isBy = head.dataset.by === sorted.by;
    if (isBy) head.setAttribute("aria-sort", (head.dataset.by === "name") === sorted.isDown ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  }
  $("sort").value = sorted.by;
}

function showChips() {
  for (const button of $("chips").children) {
    const { has, words } = CHIPS[button.dataset.chip];
    const count = rows.filter(has).length;
    put(button, `${words} ${number.format(count)}`);
    attribute(button, "aria-pressed", String(button.dataset.chip === shownChip));
    button.hidden = count === 0 && button.dataset.chip !== shownChip;
  }
}

function showList() {
  const folds = rows.length >= FOLDS_FROM && !$("filter").value.trim();
  const found = rows.filter((row) => CHIPS[shownChip].has(row) && isFound(row));
  const folded = folds ? found.filter((row) => row.isIdle && !open.has(row.name)) : [];
  const listed = found.filter((row) => !folded.includes(row));
  for (const [name, card] of open) {
    if (listed.some((row) => row.name === name)) continue;
    card.row.remove();
    open.delete(name);
  }
  const items = listed.flatMap((row) => (open.has(row.name) ? [row, { card: open.get(row.name), row }] : [row]));
  each($("rows"), items, (item) => (item.card ? `card ${item.card.name}` : item.name),
    (item) => (item.card ? item.card.row : makeRow(item)), (element, item) => (item.card ? showCard(item.card, item.row) : showRow(element, item)));
  $("none").hidden = listed.length + folded.length > 0;
  $("idle").hidden = folded.length === 0;
  put($("idle-count"), `${plural(folded.length, "idle limit")}: nothing was asked of them in the ${RANGES[range].words.replace("min", "minutes")}`);
  fill($("idle-names"), folded.map(({ name }) => name), () => folded.map(({ name, limit }) => {
    const button = h("button.plain", { type: "button" }, name);
    button.addEventListener("click", () => {
      $("filter").value = name;
      showList();
      if (!open.has(name)) toggle(name);
    });
    return h("li", h("span.mono", button), h("span.faint", ` ${limit.rule}`));
  }));
}

// The whole.

const all = chart($("all-chart"));
const deniedOnly = chart($("denied-chart"));
let allDrawn = null;

function showSums(snapshot) {
  const sum = (kind) => snapshot.limits.reduce((total, { limit }) => total + now(limit, kind), 0);
  const together = (of) => snapshot.servers.reduce((total, server) => total + of(server), 0);
  const [allowed, denied] = showsAll()
    ? [together((server) => server.allowed + server.would_deny), together((server) => server.denied)]
    : [sum("allowed") + sum("would_deny"), sum("denied")];
  put($("sum-allowed"), rate(allowed));
  put($("sum-denied"), rate(denied));
  $("sum-denied").classList.toggle("deny", denied > 0);
  put($("sum-share"), percent(allowed + denied > 0 ? denied / (allowed + denied) : 0));
  $("sum-keys-all").hidden = snapshot.keys === null; // nobody counts the keys of a shared store
  if (snapshot.keys !== null) put($("sum-keys"), rate(snapshot.keys));
  put($("total-allowed"), rate(allowed));
  put($("total-denied"), rate(denied));
  $("total-denied").classList.toggle("deny", denied > 0);
  for (const name of ["p50", "p95", "p99"]) put($(name), snapshot.latency ? latency(snapshot.latency[`${name}_ns`]) : "–");
  const bars = rangedAll(snapshot.limits.map(({ limit }) => limit), range);
  const frame = { t0: bars.t0, step: bars.step, unit: "/s", hasLane: true, events: happenings(), ticks: 2 };
  // Few denials among many requests would not be seen: they have an axis of their own.
  const mostDenied = Math.max(...bars.denied);
  const isSmall = mostDenied > 0 && mostDenied < 0.2 * Math.max(...bars.allowed);
  allDrawn = { ...frame, height: isSmall ? 120 : 190, label: `Requests a second under all limits, ${RANGES[range].words}`,
    series: [{ name: "allowed", kind: "f1", values: bars.allowed.map((one, index) => one + bars.would_deny[index]) }, { name: "denied", kind: "fd", values: bars.denied }] };
  all.update(allDrawn);
  $("denied-chart").hidden = !isSmall;
  if (isSmall) deniedOnly.update({ ...frame, events: [], hasLane: false, height: 70, ticks: 1, label: `Denied a second, ${RANGES[range].words}`, series: [{ name: "denied", kind: "fd", values: bars.denied }] });
  put($("hint-time"), clockTime(snapshot.second));
  showLatency(snapshot);
}

const PERCENTILES = ["p50", "p95", "p99"];
const LATENCY_KINDS = ["line.l1", "line.l2.dashed", "line.l2"];
const latencyPlot = chart($("latency-chart"));

/** Percentiles over time, in milliseconds. */
function showLatency({ latency_over_time: over, second }) {
  const { count, step, field } = RANGES[range];
  const steps = over[field ?? "fives"].slice(-count);
  const values = (index) => [...new Array(count - steps.length).fill(null), ...steps.map((one) => one && one[index] / 1e6)];
  latencyPlot.update({
    label: `Time to decide in milliseconds, ${RANGES[range].words}`, t0: Math.floor(second / step) * step - count * step, step, height: 150, hasLane: true, ticks: 2, least: 0.001, unit: "",
    y: (value) => (value === 0 ? "0" : latency(value * 1e6)),
    gutter: 52, events: happenings(), series: PERCENTILES.map((name, index) => ({ name, kind: LATENCY_KINDS[index], isLine: true, values: values(index) })),
  });
}

/** What shadow limits let pass now, beside what they would deny if they were enforced. */
function showShadow() {
  const shadows = rows.filter(({ limit }) => limit.shadow);
  $("shadow").hidden = shadows.length === 0;
  put($("shadow-words"), `${RANGES[range].words}; nothing changes until shadow is taken out of the config`);
  const shown = shadows.map(({ name, limit, bars: { totals } }) => ({ name, rule: limit.rule, allowed: totals.allowed, would: totals.would_deny, denied: totals.denied, worst: limit.offenders[0] ?? null }))
    .toSorted((one, other) => other.would - one.would || one.name.localeCompare(other.name));
  fill($("shadow-rows"), shown, () => shown.map(({ name, rule, allowed, would, denied, worst }) => {
    const asked = allowed + would + denied;
    return h("tr", h("td.all", h("b.mono", name), h("span.sub", rule)), h("td.num", { "data-l": "asked" }, rate(asked)),
      h("td.num", { "data-l": "denied now" }, h("span.faint", rate(denied))),
      h("td.num", { "data-l": "if enforced" }, would > 0 ? h("b.deny", rate(would)) : h("span.faint", "0")),
      h("td.use2.all", { "data-l": "share" }, meter([["f1", asked > 0 ? allowed / asked : 0], ["hd", asked > 0 ? would / asked : 0]], percent(asked > 0 ? would / asked : 0), `${percent(asked > 0 ? would / asked : 0)} would be denied`, "meter short")),
      h("td.mono", { "data-l": "most" }, worst ? `${worst.key ?? `${worst.hash.slice(0, 12)}…`} ${number.format(worst.denials)}` : "–"));
  }));
}

/** What was decided for each namespace that the config names, and for all others together. */
function showNamespaces(namespaces) {
  $("namespaces").hidden = namespaces.length === 0;
  const count = (value, what) => h("td.num", value > 0 ? h(what, rate(value)) : h("span.faint", "0"));
  fill($("namespace-rows"), namespaces, () => namespaces.slice(0, 8).map(({ namespace, allowed, denied, would_deny: would }) =>
    h("tr", h("td.mono", namespace), count(denied, "b.deny"), count(would, "span"), count(allowed, "span"))));
}

/** Shows a snapshot. False if seconds are missing before it. */
export function showLimits(snapshot) {
  const isWhole = remember(snapshot);
  last = snapshot;
  draw();
  $("more").hidden = snapshot.more_limits === 0;
  put($("more"), `and ${number.format(snapshot.more_limits)} limits more, which /v1/limits lists`);
  offer(snapshot);
  showFleet(snapshot);
  showNamespaces(snapshot.namespaces);
  return isWhole;
}

let isFirst = true;

/** Who looks at a server that nobody has asked yet sees how to ask it. */
function greet() {
  if (!isFirst) return;
  isFirst = false;
  if (rows.length > 0 && rows.length < FOLDS_FROM && rows.every((row) => row.isIdle)) toggle(rows[0].name);
}

function draw(isAsked = false) {
  if (!last) return;
  showScope();
  rows = last.limits.map(known);
  sortRows(isAsked);
  showSums(last);
  showChips();
  showHeads();
  showList();
  showShadow();
  greet();
}

const SCOPES = { this: "this server", all: "all servers" };

/** Where there are several servers, rates of now are of this one or of all of them. */
function showScope() {
  $("scope").hidden = last.servers.length < 2 || range !== "5m";
  for (const button of $("scope").children) attribute(button, "aria-pressed", String((button.dataset.scope === "all") === isOfAll));
}

/** What a longer range needs is asked for once a minute. `refresh` asks for all of it. */
export function startLimits(refresh) {
  for (const [key, { name }] of Object.entries(RANGES)) {
    const button = h("button", { type: "button", "data-range": key, "aria-pressed": String(key === range) }, name);
    button.addEventListener("click", () => {
      range = key;
      for (const other of $("range").children) other.setAttribute("aria-pressed", String(other === button));
      put($("range-head"), `${RANGES[range].words}, own scale`);
      draw(true);
      if (range !== "5m") refresh();
    });
    $("range").append(button);
  }
  for (const [key, words] of Object.entries(SCOPES)) {
    const button = h("button", { type: "button", "data-scope": key, title: "Rates of now; charts, the fullest key and p99 are of this server" }, words);
    button.addEventListener("click", () => {
      isOfAll = key === "all";
      draw(true);
    });
    $("scope").append(button);
  }
  for (const key of Object.keys(CHIPS)) {
    const button = h("button", { type: "button", "data-chip": key });
    button.addEventListener("click", () => {
      shownChip = shownChip === key ? "all" : key;
      draw();
    });
    $("chips").append(button);
  }
  $("sort").append(...Object.entries(SORTS).map(([key, { words }]) => new Option(words, key)));
  $("sort").addEventListener("change", () => {
    sorted = { by: $("sort").value, isDown: true };
    draw(true);
  });
  for (const head of $("heads").cells) {
    head.querySelector("button")?.addEventListener("click", () => {
      sorted = { by: head.dataset.by, isDown: head.dataset.by === sorted.by ? !sorted.isDown : true };
      draw(true);
    });
  }
  $("latency-legend").append(legend(PERCENTILES.map((name, index) => [LATENCY_KINDS[index], name])));
  $("csv").addEventListener("click", () => last && saveCsv(`limits-${range}.csv`,
    ["limit", "policy", "strategy", "shadow", "overrides", "allowed_per_s", "denied_per_s", "would_be_denied_per_s", "share_denied", "fullest_key", "p99_ns", "counted"],
    rows.map((row) => [row.name, row.limit.rule, row.limit.strategy, row.limit.shadow, row.limit.overrides, row.mean.allowed, row.mean.denied, row.mean.would, row.share, row.limit.fullest, row.limit.p99_ns, row.fallsBack ? `fallback: ${row.limit.fallback}` : row.limit.store])));
  $("filter").addEventListener("input", () => last && showList());
  $("clear").addEventListener("click", () => {
    $("filter").value = "";
    shownChip = "all";
    draw();
    $("filter").focus();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea, dialog");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    $("filter").focus();
  });
  $("all-legend").append(legend([["f1", "allowed"], ["fd", "denied"]]));
  numbers($("all-numbers"), () => allDrawn);
  // Totals join the bar once theirs are scrolled away.
  new IntersectionObserver(([seen]) => { $("totals").hidden = seen.isIntersecting; }, { rootMargin: "-60px 0px 0px" }).observe($("sum-allowed"));
  setInterval(() => { if (range !== "5m" && !document.hidden) refresh(); }, 60000);
}
