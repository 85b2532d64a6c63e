// Language models: how full each is, who waits for what and why, what clients use, how true estimates were. Fed by /v1/llm, which names clients
// and so needs the admin token where there is one. The token stays in this tab's memory.

import { notice } from "./alerts.js";
import { ask } from "./ask.js";
import { chart, legend, meter, numbers } from "./chart.js";
import { $, each, fill, h, options, put } from "./nodes.js";
import { clockTime, dateTime, number, percent, plural, rate, span } from "./words.js";

const EVERY_MS = 1000;
const ALL = "all";
const SHOWN = 12;
const RANGES = { "5m": ["5 min", "last 5 minutes"], "1h": ["1 h", "last hour"], "24h": ["24 h", "last 24 hours"] };

let last = null;
let drawn = null;
let token = "";
let range = "1h";

const faint = (words) => h("span.faint", words);
const sub = (words) => h("span.sub", words);
const seconds = (ms) => span(Math.max(100, Math.ceil(ms / 100) * 100));

// The models.

function limitOf({ limits }, units) {
  return limits.find(({ unit }) => units.includes(unit)) ?? null;
}

function bar(limit) {
  if (!limit) return faint("no such limit");
  if (limit.used === null) return faint("not known: the store cannot be asked");
  const settled = Math.max(0, limit.used - limit.reserved);
  const share = (value) => (limit.capacity ? value / limit.capacity : 0);
  const isFull = share(limit.used) >= 0.95;
  const words = [h("b", rate(limit.used)), ` of ${rate(limit.capacity)}`];
  const label = `${number.format(limit.used)} of ${number.format(limit.capacity)} ${limit.unit} used, ${number.format(limit.reserved)} of them reserved`;
  return meter([[isFull ? "fd" : "f2", share(settled)], ["hs", share(limit.reserved)]], words, label);
}

/** Limits beside requests and tokens a minute, in words. */
function otherWords({ limits }) {
  return limits.filter(({ unit }) => !["RPM", "TPM"].includes(unit))
    .map(({ unit, used, capacity }) => `${used === null ? "?" : rate(used)} of ${rate(capacity)} ${unit}`);
}

function modelRow({ model }) {
  return h("tr", { "data-model": model }, h("td.all"), h("td.use2.all", { "data-l": "requests" }), h("td.use2.all", { "data-l": "tokens" }),
    h("td.num", { "data-l": "waiting" }), h("td.num", { "data-l": "longest wait" }), h("td.num", { "data-l": "refused, 1 h" }), h("td"));
}

function showModel(row, model) {
  const [name, requests, tokens, waiting, longest, refused, counted] = row.cells;
  const shared = last.models.filter((one) => one.quota === model.quota && one.model !== model.model).map((one) => one.model);
  const about = [model.upstream, shared.length ? `quota: ${model.quota}, also ${shared.join(", ")}` : "quota: own", ...otherWords(model)].join(" · ");
  fill(name, [model.model, model.shadow, about], () => [h("b.mono", model.model), " ", model.shadow && h("span.tag.dash", "shadow"), sub(about)]);
  const rpm = limitOf(model, ["RPM"]);
  const tpm = limitOf(model, ["TPM"]) ?? limitOf(model, ["input TPM", "output TPM"]);
  fill(requests, rpm, () => bar(rpm));
  fill(tokens, tpm, () => bar(tpm));
  fill(waiting, model.waiting, () => (model.waiting ? h("b", number.format(model.waiting)) : faint("0")));
  fill(longest, model.longest_wait_ms, () => (model.longest_wait_ms === null ? faint("–") : seconds(model.longest_wait_ms)));
  fill(refused, model.refused, () => (model.refused ? h("b.deny", number.format(model.refused)) : faint("0")));
  const fellBack = model.counted.startsWith("fallback");
  fill(counted, model.counted, () => (fellBack ? h("span.tag.warn", model.counted) : faint(model.counted)));
  counted.classList.toggle("hide-small", !fellBack);
  longest.classList.toggle("hide-small", model.longest_wait_ms === null);
}

// The line.

function lineItem() {
  return h("li", h("span.place"), h("div", h("p"), h("p.why")), h("p.in", h("span"), h("span.faint")));
}

function showLine() {
  options($("models-show"), [ALL, ...last.models.map(({ model }) => model)]);
  const chosen = $("models-show").value || ALL;
  const shown = last.line.filter(({ model }) => chosen === ALL || model === chosen).slice(0, SHOWN);
  // A call has no name that could be shown, so places are kept and not calls.
  each($("models-line"), shown.map((call, index) => ({ ...call, index })), ({ index }) => index, lineItem, (item, call) => {
    put(item.children[0], number.format(call.index + 1));
    const [who, why] = item.children[1].children;
    fill(who, [call.client, call.priority, call.model, call.tokens], () => [h("b", call.client), faint(` ${call.priority} · `), h("span.mono", call.model), faint(` · ${number.format(call.tokens)} tokens`)]);
    put(why, call.reason);
    const [goes, gives] = item.children[2].children;
    fill(goes, call.goes_in_ms, () => (call.goes_in_ms === null ? "not known when" : ["goes in ", h("b", seconds(call.goes_in_ms))]));
    put(gives, `gives up in ${span(Math.ceil(call.gives_up_in_ms / 1000) * 1000)}`);
    gives.className = call.goes_in_ms === null || call.goes_in_ms > call.gives_up_in_ms ? "warn" : "faint";
  });
  put($("models-line-count"), last.waiting === 0 ? "nobody waits" : `${number.format(shown.length)} of ${number.format(last.waiting)}, next first`);
}

// Keys, clients, estimates.

/** The note of a group that is in use. */
function groupNote({ keys, stands_in_for, reports, others }) {
  if (stands_in_for.length) return `takes the calls of ${stands_in_for.join(", ")}`;
  if (others) return `others use it too: ${rate(others.used)} of ${rate(others.capacity)} ${others.unit}, with some headroom`;
  if (reports === "agree") return "its reports agree with our count";
  return keys === 0 ? "callers bring their own keys" : "nothing reported yet";
}

function showGroups() {
  each($("models-groups"), last.groups, ({ upstream, group }) => `${upstream} ${group}`, () => h("tr", h("td.all"), h("td"), h("td.num", { "data-l": "429s, 1 h" })), (row, one) => {
    fill(row.cells[0], [one.group, one.upstream, one.keys], () => [h("b.mono", one.group), sub(`${one.upstream} · ${one.keys === 0 ? "no key needed" : plural(one.keys, "key")}`)]);
    const isResting = one.rest_ms !== null;
    const note = groupNote(one);
    fill(row.cells[1], isResting ? one.rest_ms : note, () => (isResting ? [h("span.tag.warn", "parked"), sub(`opens in ${seconds(one.rest_ms)}, as the provider said`)] : [faint("in use"), sub(note)]));
    fill(row.cells[2], one.limited, () => (one.limited ? number.format(one.limited) : faint("0")));
  });
  const resting = last.groups.filter(({ rest_ms }) => rest_ms !== null);
  const [first] = resting;
  notice("models-parked", resting.length === 1 ? `1 group of keys is parked for ${seconds(first?.rest_ms ?? 0)}.` : `${resting.length} groups of keys are parked.`,
    first ? parkedWords(resting) : null, { isAmber: true, link: { words: "Keys of the providers", href: "#parked" } });
}

/** Who parked them, since when, and what became of their calls. */
function parkedWords(resting) {
  const groups = resting.map(({ upstream, group, parked_since }) => `${upstream} ${group}${parked_since === null ? "" : ` at ${clockTime(parked_since)}`}`).join(", ");
  const free = last.groups.filter(({ stands_in_for }) => stands_in_for.length).map(({ group }) => group);
  const calls = free.length ? `Calls go to ${free.join(", ")}` : "Calls wait";
  const reached = last.passed_on ? `${plural(last.passed_on, "refusal")} reached a caller in the last hour` : "no caller saw a 429";
  return `The provider asked to leave alone: ${groups}. ${calls}; ${reached}.`;
}

function showClients() {
  const all = last.clients.reduce((sum, { tokens }) => sum + tokens, 0);
  $("models-no-clients").hidden = last.clients.length > 0;
  $("models-clients-table").hidden = last.clients.length === 0;
  each($("models-clients"), last.clients, ({ client }) => client, () => h("tr", h("td.mono"), h("td.num"), h("td")), (row, { client, weight, tokens }) => {
    put(row.cells[0], client);
    put(row.cells[1], number.format(weight));
    fill(row.cells[2], [tokens, all], () => meter([["f2", tokens / all]], percent(tokens / all), `${number.format(tokens)} tokens, ${percent(tokens / all)}`, "meter.short"));
  });
}

function showEstimates() {
  const known = last.models.filter(({ estimates }) => estimates !== null);
  $("models-no-estimates").hidden = known.length > 0;
  $("models-estimates").hidden = known.length === 0;
  const reach = Math.max(200, ...known.flatMap(({ estimates: { p5, p95 } }) => [1000 - p5, p95 - 1000]));
  const most = Math.ceil((Math.min(reach, 3000) * 1.1) / 100) * 100;
  const x = (value) => 50 + (Math.max(-most, Math.min(most, value - 1000)) / most) * 50;
  const plotOf = ({ p5, p50, p95 }) => h("svg", { viewBox: "0 0 100 16", preserveAspectRatio: "none", role: "img", "aria-label": `median ${p50 / 1000}, 90 of 100 calls from ${p5 / 1000} to ${p95 / 1000}` },
    h("path.base", { d: "M50 0V16", "vector-effect": "non-scaling-stroke", "stroke-dasharray": "2 2" }),
    h("rect.f1", { x: x(p5), y: 6, width: Math.max(1, x(p95) - x(p5)), height: 4 }), h("rect.f2", { x: x(p50) - 0.6, y: 2, width: 1.2, height: 12 }));
  fill($("models-estimates"), [known.map(({ model, estimates }) => [model, estimates]), most], () => [
    h("span.head", "model"), h("span.head", "true ÷ estimated"), h("span.head.factor", "factor"),
    known.map(({ model, estimates }) => [h("span.mono", model), plotOf(estimates), h("span.factor", estimates.factor === null ? "exact" : `${(estimates.factor / 1000).toFixed(2)} ×`)]),
    h("span"), h("span.axis", { "aria-hidden": "true" }, [-most, 0, most].map((value) => h("span", ((1000 + value) / 1000).toString()))), h("span")]);
  const { reserved, given_back, used, beyond, unreported, open } = last.settlement;
  const share = (part, whole) => (whole ? percent(part / whole) : "–");
  const facts = [["Reserved, then given back", share(given_back, reserved)], ["Used beyond the reservation", share(beyond, used)],
    ["Settled without a usage report", plural(unreported, "call")], ["Under way now", plural(open, "call")]];
  fill($("models-facts"), facts, () => facts.map(([name, value]) => [h("dt", name), h("dd", value)]));
}

// Tokens a minute.

const plot = chart($("models-chart"));

/** When the store was down, and when keys of this model's upstream were parked. */
function happenings(model) {
  const groups = last.groups.filter(({ upstream }) => upstream === model.upstream).map(({ group }) => group);
  const length = (from, to) => span(Math.max(1, to - from) * 1000);
  return [
    ...last.troubles.map(({ from, to }) => ({ kind: "w", from, to: to ?? last.second, label: "store down", long: `store down from ${dateTime(from)}${to ? ` for ${length(from, to)}` : ""}; limits fell back` })),
    ...last.parked.filter(({ group }) => groups.includes(group)).map(({ group, from, to }) => ({ kind: "w", from, to: Math.min(to, last.second), label: `${group} parked`, long: `${group} was parked from ${dateTime(from)} for ${length(from, to)}` })),
  ];
}

function showTokens() {
  options($("models-of"), last.models.map(({ model }) => model));
  const model = last.models.find((one) => one.model === $("models-of").value) ?? last.models[0];
  if (!model) return;
  const { step, input, output } = { "5m": model.recent, "1h": { step: 60, input: model.input, output: model.output }, "24h": model.day }[range];
  const aMinute = (values) => values.map((value) => (value * 60) / step);
  const end = (Math.floor(last.second / step) + 1) * step;
  const tpm = limitOf(model, ["TPM"]);
  const isMinute = last.window_ms === 60000;
  drawn = {
    label: `Tokens a minute of ${model.model}, ${RANGES[range][1]}`, t0: end - input.length * step, step, height: innerWidth < 800 ? 180 : 220, y: rate,
    hasLane: true, events: happenings(model),
    limit: tpm && isMinute ? { value: tpm.capacity, label: `limit: ${number.format(tpm.capacity)} TPM` } : null,
    series: [{ name: "input", kind: "f1", values: aMinute(input) }, { name: "output", kind: "f2", values: aMinute(output) }],
  };
  plot.update(drawn);
}

// The whole.

function showSums() {
  const of = (unit, what) => last.models.reduce((sum, { quota, limits }, index) => {
    const isFirst = last.models.findIndex((one) => one.quota === quota) === index; // a shared quota is counted once
    const limit = isFirst ? limits.find((one) => one.unit === unit) : null;
    return sum + (limit ? limit[what] ?? 0 : 0);
  }, 0);
  const refused = last.models.reduce((sum, one) => sum + one.refused, 0);
  const window = last.window_ms === 60000 ? "last minute" : `last ${span(last.window_ms)}`;
  const sums = [[rate(of("RPM", "used")), `requests, ${window}`], [rate(of("TPM", "used")), `tokens, ${window}`], [rate(of("TPM", "reserved")), "tokens reserved"],
    [number.format(last.waiting), "calls waiting"], [last.median_wait_ms === null ? "–" : seconds(last.median_wait_ms), "median wait"],
    [number.format(refused), "refused, last hour", refused > 0], [number.format(last.passed_on), "429s that reached a caller", last.passed_on > 0]];
  fill($("models-sums"), sums, () => sums.map(([value, name, isBad]) => h("div", h("dt", name), h(isBad ? "dd.deny" : "dd", value))));
}

function show(answer) {
  notice("models-configured", "There is no gateway here.", answer.configured ? null : "The config has no [llm.upstreams].", { isAmber: true });
  if (!answer.configured) return;
  last = answer;
  $("models-all").hidden = false;
  showSums();
  put($("models-counted"), `in any ${span(last.window_ms)}, ${last.store === "memory" ? "this gateway alone" : "all gateways together"}`);
  each($("models-rows"), last.models, ({ model }) => model, modelRow, showModel);
  showLine();
  showGroups();
  showClients();
  showTokens();
  showEstimates();
  put($("foot-more"), ` · ${last.trail ? `Trail: ${last.trail}` : "No trail is written"} · No prompt is kept`);
}

let isReading = false;

async function read() {
  if (isReading || document.hidden) return;
  isReading = true;
  try {
    const { status, isOk, reply } = await ask("GET", "/v1/llm", null, token);
    $("models-token-form").hidden = status !== 401;
    if (isOk) show(reply);
    else if (status === 401 && token) {
      token = "";
      put($("models-problem"), "That is not the admin token.");
    } else if (!isOk && status !== 401) {
      put($("models-problem"), reply.detail ?? "");
      $("models-token-form").hidden = false;
    }
  } catch {
    // The bar says that the connection is lost.
  } finally {
    isReading = false;
  }
}

export function startModels() {
  $("models-legend").append(legend([["f2", "used"], ["fd", "used, nearly full"], ["hs", "reserved by calls under way"]]));
  $("models-tokens-legend").append(legend([["f1", "input"], ["f2", "output"], ["w", "degraded"]]));
  for (const [key, [name]] of Object.entries(RANGES)) {
    const button = h("button", { type: "button", "data-range": key, "aria-pressed": String(key === range) }, name);
    button.addEventListener("click", () => {
      range = key;
      for (const other of $("models-range").children) other.setAttribute("aria-pressed", String(other === button));
      if (last) showTokens();
    });
    $("models-range").append(button);
  }
  numbers($("models-numbers"), () => drawn);
  $("models-show").addEventListener("change", () => last && showLine());
  $("models-of").addEventListener("change", () => last && showTokens());
  $("models-token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("models-token").value;
    $("models-token").value = "";
    put($("models-problem"), "");
    read();
  });
  read();
  setInterval(() => { if (last || $("models-token-form").hidden) read(); }, EVERY_MS);
}
