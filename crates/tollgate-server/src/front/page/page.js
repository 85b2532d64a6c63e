// The page's script: takes what the server sends each second, and shows it.
//
// What came from other places (keys, names, reasons) is put in as text, never as markup. Nothing is kept but the choice of
// light or dark. Numbers tick without being announced; states are announced. There is one document and a view for each address:
// overview.js has the limits, try.js their form, key.js one key, jobs.js has background jobs, models.js language models.

import { notice } from "./alerts.js";
import { ask, setNeedsToken } from "./ask.js";
import { startJobs } from "./jobs.js";
import { startKey } from "./key.js";
import { startModels } from "./models.js";
import { $, attribute, make, put } from "./nodes.js";
import { showLimits, startLimits } from "./overview.js";
import { dateTime, number } from "./words.js";

const POLL_MS = 2000;
const RETRY_MS = 30000;
const NAMED = 6; // limits in one line

function showStore({ store, limits, keys }) {
  put($("store"), store.mode === "memory" ? "in memory" : `${store.mode}: ${store.state}`);
  attribute($("store"), "data-state", store.state === "probing" ? "down" : store.state);
  const isDown = store.state !== "up";
  const fallbacks = Object.entries(Object.groupBy?.(limits, (limit) => limit.fallback) ?? {});
  const named = (of) => (of.length > NAMED ? `${of.slice(0, NAMED).join(", ")} and ${number.format(of.length - NAMED)} more` : of.join(", "));
  const how = fallbacks.map(([fallback, of]) => `${fallback}: ${named(of.map((one) => one.limit))}`).join("\n");
  const why = store.last_failure ? ` (${store.last_failure.replaceAll("_", " ")})` : "";
  // The same words while it is tried again now and then: a state is announced when it changes, and this one has not.
  const title = store.state === "partial" ? "A node of the store is down, and the limits of its keys fall back."
    : "The store is down, and limits fall back.";
  notice("store", title,
    isDown ? `${store.mode} since ${dateTime(store.since)}${why}\n${how}` : null, { isAmber: true });
  const facts = [["store", store.mode], ["state", store.state]];
  if (store.mode === "memory") {
    facts.push(["keys", number.format(keys ?? 0)]);
  } else {
    facts.push([`${store.state} since`, dateTime(store.since)], ["outages", number.format(store.outages)],
      ["answered by fallback", number.format(store.fallen_back)], ["ambiguous calls", number.format(store.ambiguous)]);
    if (store.last_failure) facts.push(["last failure", store.last_failure.replaceAll("_", " ")]);
  }
  const list = $("store-facts");
  while (list.children.length > facts.length * 2) list.lastElementChild.remove();
  facts.forEach(([name, value], index) => {
    while (list.children.length < index * 2 + 2) list.append(make("dt"), make("dd"));
    put(list.children[index * 2], name);
    put(list.children[index * 2 + 1], value);
  });
}

let reloadsShown = "";

function showReloads(reloads) {
  const newest = reloads.at(-1);
  notice("config", "The changed config was refused; the last good one stays in force.",
    newest?.refused ? newest.refused : null);
  notice("restart", "Fields of the config have changed that need a restart.",
    newest?.restart.length ? newest.restart.join("\n") : null);
  const text = JSON.stringify(reloads);
  if (text === reloadsShown) return;
  reloadsShown = text;
  $("no-reloads").hidden = reloads.length > 0;
  $("reloads").hidden = reloads.length === 0;
  $("reloads").replaceChildren(...reloads.toReversed().map(({ at, refused, restart, changes, more_changes: more }) => {
    const item = make("li");
    const time = make("time", "", dateTime(at));
    time.dateTime = new Date(at * 1000).toISOString();
    item.append(time, make("span", refused ? "refused" : "", refused ? "refused" : "applied"));
    if (refused) item.append(make("p", "why", refused));
    if (changes.length) item.append(make("p", "why", changes.join("\n") + (more > 0 ? `\nand ${number.format(more)} more` : "")));
    else if (!refused && !restart.length) item.append(make("p", "why", "nothing differs"));
    if (restart.length) item.append(make("p", "why", `needs a restart: ${restart.join(", ")}`));
    return item;
  }));
}

const VIEWS = {
  "/": { name: "limits", title: "What Tollgate allows and denies", start: () => startLimits(poll) },
  "/key": { name: "key", title: "One key", start: () => startKey() },
  "/jobs": { name: "jobs", title: "Background jobs", start: startJobs },
  "/models": { name: "models", title: "Language models", start: startModels },
};
const view = VIEWS[location.pathname] ?? VIEWS["/"];

function show(snapshot) {
  put($("version"), snapshot.version);
  $("grafana").hidden = !snapshot.grafana;
  $("grafana-limits").hidden = !snapshot.grafana;
  if (snapshot.grafana) for (const id of ["grafana", "grafana-limits"]) attribute($(id), "href", snapshot.grafana);
  $("nav-jobs").hidden = !snapshot.has_jobs;
  $("nav-models").hidden = !snapshot.has_models;
  setNeedsToken(snapshot.needs_token);
  showStore(snapshot);
  showReloads(snapshot.reloads);
  notice("draining", "The server is shutting down.", snapshot.draining ? "Open requests are finished; no new connections are accepted." : null);
  return view.name === "limits" ? showLimits(snapshot) : true;
}

$(`view-${view.name}`).hidden = false;
put($("title"), view.title);
if (view.name !== "limits") document.title = `${view.title} · Tollgate`;
document.querySelector(`nav a[href="${location.pathname}"]`)?.setAttribute("aria-current", "page");
view.start?.();

// Light and dark.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function kept(theme) {
  try {
    if (theme) localStorage.setItem("tollgate-theme", theme);
    return localStorage.getItem("tollgate-theme");
  } catch {
    return theme ?? null; // a browser that keeps nothing
  }
}

const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
const showTheme = () => put($("theme"), isDark() ? "Light" : "Dark");

if (["light", "dark"].includes(kept())) document.documentElement.dataset.theme = kept();
showTheme();
prefersDark.addEventListener("change", showTheme);
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  kept(document.documentElement.dataset.theme);
  showTheme();
});

// The connection to the server: events, and polling while there are none.

let events = null;
let polling = null;

function link(state, words) {
  attribute($("link"), "data-state", state);
  put($("link"), words);
}

async function poll() {
  try {
    const { isOk, reply } = await ask("GET", "/v1/snapshot");
    if (!isOk) throw new Error("no snapshot");
    show(reply);
    if (polling !== null) link("polling", "every 2 s");
  } catch {
    link("lost", "connection lost, trying again");
  }
}

function startPolling() {
  if (polling !== null) return;
  polling = setInterval(poll, POLL_MS);
  poll();
}

function stopPolling() {
  clearInterval(polling);
  polling = null;
}

function listen() {
  events?.close();
  events = new EventSource("/v1/events");
  events.onmessage = ({ data }) => {
    stopPolling();
    link("live", "live");
    if (!show(JSON.parse(data))) poll();
  };
  events.onerror = () => {
    startPolling();
    // Turned away: there is no room, or a proxy in between will have none of this.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
  };
}

listen();
