// One key: how it stands under each limit, the last decisions about it, and what differs for it: blocked, freed or other numbers until a time.
//
// The key is kept in this script alone and sent in bodies of requests: it is in no address, so in no history of the browser.

import { ask, askAsAdmin, knownToken, makeSure, needsToken, strong, tokenWorked } from "./ask.js";
import { chart, legend, meter, numbers, swatch } from "./chart.js";
import { saveCsv } from "./csv.js";
import { RANGES } from "./limits.js";
import { $, attribute, copy, each, fill, h, options, put } from "./nodes.js";
import { decisionWords } from "./try.js";
import { clock, dateTime, moment, number, plural, rate, span } from "./words.js";

const EVERY_MS = 2000;
const SHOWN = 20;
const LEAST_LIMIT = 0.05; // a second; a line of less would lie on the axis

let key = null; // which key is open
let last = null; // what was answered last
let drawn = null;
let which = "all";
let range = "5m";
let isWhole = false; // whether all decisions of the range are listed

const faint = (words) => h("span.faint", words);
const sub = (words) => h("span.sub", words);
const at = (text) => Date.parse(text) / 1000;

// The request.

const HASH = /^[0-9a-f]{32}$/;

async function open(text, token) {
  // What looks like a hash may be a key all the same.
  const byHash = HASH.test(text) ? await ask("POST", "/v1/key", { hash: text }, token) : null;
  const answered = byHash && byHash.status !== 404 ? byHash : await ask("POST", "/v1/key", { key: text }, token);
  if (answered.status === 401) {
    put($("key-problem"), token ? "That is not the admin token." : "This needs the admin token.");
    $("key-token").hidden = false;
    $("key-token").focus();
    return;
  }
  if (!answered.isOk) {
    put($("key-problem"), answered.reply.detail ?? "The server did not answer.");
    return;
  }
  tokenWorked(token);
  put($("key-problem"), byHash?.status === 404 ? byHash.reply.detail : "");
  const isOther = key !== answered.reply.key;
  key = answered.reply.key;
  show(answered.reply, isOther);
}

async function refresh() {
  if (key === null || document.hidden) return;
  try {
    const { isOk, reply } = await ask("POST", "/v1/key", { key }, knownToken());
    if (isOk && reply.key === key) show(reply, false);
  } catch {
    // The line to the server says so already.
  }
}

// What is shown.

const isMet = (limit) => limit.source !== "default" || limit.used > 0 || limit.allowed_lately + limit.denied_lately + limit.would_deny_lately > 0 || !limit.answered;
const share = (limit) => (limit.blocked ? 2 : limit.capacity ? limit.used / limit.capacity : 0);

function sentence() {
  const met = last.limits.filter(isMet);
  const denying = met.filter(({ allowed, shadow }) => allowed === false && !shadow).toSorted((one, other) => share(other) - share(one));
  const words = [];
  if (denying.length > 0) {
    const [first] = denying;
    const left = first.blocked ? "blocked" : `${number.format(first.remaining)} of ${number.format(first.capacity)} left`;
    words.push(h("b", "Being denied by ", h("code", first.limit), ": ", h("span.deny", left)), first.retry_after_ms === null ? "." : `, more in ${span(first.retry_after_ms)}.`);
    if (denying.length > 1) words.push(` ${plural(denying.length - 1, "other limit")} too.`);
  } else {
    words.push(h("b", met.length > 0 ? "No limit denies it now." : "No limit has counted anything of it."));
  }
  const set = met.filter(({ source }) => source === "set");
  words.push(` It counts under ${plural(met.length, "limit")}`);
  if (set.length > 0) words.push(`; ${plural(set.length, "override")} ${set.length === 1 ? "was" : "were"} set${set.length === 1 && set[0].until ? `, until ${moment(at(set[0].until))}` : ""}`);
  words.push(".");
  const [newest] = last.decisions;
  if (newest) words.push(" ", faint(`Last decision ${span(Math.max(1, last.second * 1000 - newest.at_ms))} ago.`));
  return words;
}

function limitRow() {
  const cells = ["td.all", "td.use2.all", "td.num", "td.num", "td.num", "td", "td.nowrap"].map((what) => h(what));
  ["used", "left", "full again in", "denied lately", "numbers", "counted"].forEach((label, index) => cells[index + 1].setAttribute("data-l", label));
  return h("tr", cells);
}

function usedMeter(limit) {
  if (!limit.answered) return faint("not known: the store did not answer");
  if (limit.unlimited) return faint("nothing is counted");
  if (limit.blocked) return meter([["fd", 1]], "blocked", "blocked");
  const words = `${number.format(limit.used)} of ${number.format(limit.capacity)}`;
  const isFull = limit.allowed === false;
  return meter([[isFull ? (limit.shadow ? "hd" : "fd") : "f2", limit.capacity ? limit.used / limit.capacity : 0]], words, `${words} used`);
}

function numbersOf({ source, until, instead_of: before, reason }) {
  if (source === "default") return faint("by default");
  if (source === "config") return [h("span.tag.info", "override of the config"), sub(`instead of ${before}`)];
  return [h("span.tag.info", until ? `override until ${moment(at(until))}` : "override, no end"), sub(`instead of ${before}${reason ? ` · ${reason}` : ""}`)];
}

/** Whether the last decision about the key under a limit was made without the store. */
const fellBack = (name) => last.decisions.find(({ limit }) => limit === name)?.why === "fallback";

function showLimits() {
  const met = last.limits.filter(isMet).toSorted((one, other) => Number(one.shadow) - Number(other.shadow) || share(other) - share(one) || one.limit.localeCompare(other.limit));
  each($("key-limits"), met, ({ limit }) => limit, limitRow, (row, limit) => {
    const [name, used, left, reset, denied, what, counted] = row.cells;
    fill(name, [limit.limit, limit.shadow, limit.rule], () => [h("b.mono", limit.limit), " ", limit.shadow && h("span.tag.dash", "shadow"), sub(limit.rule)]);
    fill(used, [limit.used, limit.capacity, limit.allowed, limit.blocked, limit.unlimited, limit.answered], () => usedMeter(limit));
    fill(left, [limit.remaining], () => (limit.remaining === null ? faint("–") : limit.remaining === 0 ? h("b.deny", "0") : number.format(limit.remaining)));
    put(reset, limit.capacity === null ? "–" : limit.reset_after_ms > 0 ? span(limit.reset_after_ms) : "unused");
    const count = limit.shadow ? limit.would_deny_lately : limit.denied_lately;
    fill(denied, [count, limit.shadow], () => (count > 0 ? [h("b.deny", number.format(count)), limit.shadow && sub("would be")] : faint("0")));
    fill(what, [limit.source, limit.until, limit.instead_of, limit.reason], () => numbersOf(limit));
    const fallsBack = fellBack(limit.limit);
    fill(counted, [limit.store, fallsBack], () => (fallsBack ? h("span.tag.warn", `fallback: ${limit.fallback}`) : h("span.faint", limit.store === "memory" ? "here" : "remote")));
  });
  const others = last.limits.length - met.length + last.more_limits;
  put($("key-others"), others > 0 ? `Under ${plural(others, "other limit")} nothing is counted of it.` : "");
}

const startOf = (name) => Math.floor(last.second / RANGES[name].step) * RANGES[name].step - (RANGES[name].count - 1) * RANGES[name].step;

/** What a limit lets pass on the average, where that is a rate. */
function lineOf(name) {
  const limit = last.limits.find((one) => one.limit === name);
  if (!limit || limit.blocked || limit.unlimited || limit.strategy === "concurrency" || !limit.window_ms) return null;
  const value = limit.capacity / (limit.window_ms / 1000);
  return value >= LEAST_LIMIT ? { value, label: `limit: ${rate(value)}/s on the average` } : null;
}

function showChart() {
  const names = [...new Set(last.decisions.map(({ limit }) => limit))];
  options($("key-of"), names.length ? names : last.limits.slice(0, 1).map(({ limit }) => limit));
  const limit = $("key-of").value;
  const { count, step, words } = RANGES[range];
  const t0 = startOf(range);
  const since = last.kept_since_ms / 1000;
  // How many seconds of a bar are known: the first is perhaps cut off, and the last one goes on. Of a bar before them nothing is known.
  const known = (index) => Math.min(t0 + (index + 1) * step, last.second + 1) - Math.max(t0 + index * step, since);
  const bars = (what) => {
    const sums = new Array(count).fill(0);
    for (const one of last.decisions) {
      const index = Math.floor((one.at_ms / 1000 - t0) / step);
      if (one.limit === limit && one.what === what && index >= 0 && index < count) sums[index] += one.times;
    }
    return sums.map((sum, index) => (t0 + (index + 1) * step <= since ? null : sum / Math.max(known(index), 1)));
  };
  const missing = since > t0 ? [{ kind: "n", from: t0, to: since, label: "not kept", long: `not kept: decisions about this key are known since ${dateTime(since)}` }] : [];
  const changes = last.changes.map((one) => ({ kind: "i", from: at(one.at), label: one.what === "set" ? "override" : "override removed", long: changeWords(one) }));
  const troubles = last.troubles.map(({ from, to }) => ({ kind: "w", from, to: to ?? last.second, label: "store down", long: `store down from ${dateTime(from)}${to ? ` for ${span((to - from) * 1000)}` : ""}; limits fell back` }));
  drawn = {
    label: `Decisions a second about this key under ${limit}, ${words}`, t0, step, height: 160, unit: "/s", hasLane: true, limit: lineOf(limit), events: [...missing, ...troubles, ...changes],
    series: [{ name: "allowed", kind: "f1", values: bars("allowed") }, { name: "would be denied", kind: "hd", values: bars("would_deny") }, { name: "denied", kind: "fd", values: bars("denied") }],
  };
  plot.update(drawn);
  const unseen = last.kept === "memory" ? " This server counts in memory: what it allows is counted for the limit and not for the key, so only denials are drawn." : "";
  put($("key-kept"), `Drawn from the last decisions of this server about this key: at most ${last.most_decisions} of all limits together, none missing since ${dateTime(since)}.${unseen}`);
}

const WHICH = {
  all: { words: "All", has: () => true },
  denied: { words: "Denied", has: ({ what }) => what === "denied" },
  would: { words: "Would be", has: ({ what }) => what === "would_deny" },
  fallback: { words: "Fallback", has: ({ why }) => why === "fallback" },
};
const WHAT = { allowed: ["f1", "allowed"], denied: ["fd", "denied"], would_deny: ["hd", "would be denied"] };

function decisionRow() {
  const cells = ["td.nowrap", "td", "td.mono", "td.num", "td.num", "td.num", "td"].map((what) => h(what));
  [[3, "cost"], [4, "left"], [5, "try again in"], [6, "why"]].forEach(([index, label]) => cells[index].setAttribute("data-l", label));
  return h("tr", cells);
}

function showDecisions() {
  for (const button of $("key-which").children) attribute(button, "aria-pressed", String(button.dataset.which === which));
  const from = startOf(range) * 1000;
  const found = last.decisions.filter((one) => one.at_ms >= from && WHICH[which].has(one));
  const shown = isWhole ? found : found.slice(0, SHOWN);
  $("key-more").hidden = found.length <= SHOWN;
  put($("key-more"), isWhole ? `Show the last ${SHOWN}` : `Show all ${number.format(found.length)}`);
  each($("key-decisions"), shown.map((one, index) => ({ ...one, index })), ({ index }) => index, decisionRow, (row, one) => {
    const [time, what, limit, cost, left, retry, why] = row.cells;
    put(time, `${clock(one.at_ms / 1000, true)}.${Math.floor((one.at_ms % 1000) / 100)}`);
    const [kind, words] = WHAT[one.what];
    fill(what, [one.what, one.times], () => h("span.what", swatch(kind), one.what === "denied" ? h("b.deny", words) : words, one.times > 1 && faint(` ×${number.format(one.times)}`)));
    put(limit, one.limit);
    put(cost, number.format(one.cost));
    put(left, one.left === null ? "–" : number.format(one.left));
    put(retry, one.what === "allowed" ? "–" : one.retry_after_ms === null ? "never" : span(one.retry_after_ms));
    put(why, one.why ? one.why.replaceAll("_", " ") : "–");
    retry.classList.toggle("hide-small", one.what === "allowed");
    why.classList.toggle("hide-small", !one.why);
  });
  const kept = `The last decisions about each key are kept, up to ${last.most_decisions}. When it is denied more than 50 times in a second, the rest of them are one row with a count.`;
  put($("key-no-decisions"), `${last.decisions.length === 0 ? "None yet. " : found.length === 0 ? "None of these in this time. " : ""}${kept}${last.kept === "memory" ? " What passes in this process without a look at the key is counted and not listed." : ""}`);
}

const fieldsWords = (fields) => (fields.blocked ? "blocked" : fields.unlimited ? "no limit" : Object.entries(fields).map(([name, value]) => `${name} ${value}`).join(", "));

function changeWords({ what, limit, override, until, reason, by }) {
  const who = by ?? "an admin";
  if (what !== "set") return `${who} removed the override of ${limit}`;
  return `${who} set ${limit} to ${fieldsWords(override)}${until ? ` until ${moment(at(until))}` : ""}${reason ? ` (“${reason}”)` : ""}`;
}

function showChanges() {
  $("key-no-changes").hidden = last.changes.length > 0;
  fill($("key-changes"), last.changes, () => last.changes.slice(0, 20).map((one) => {
    const words = changeWords(one);
    const who = one.by ?? "an admin";
    return h("li", h("time", { datetime: one.at }, moment(at(one.at))), h("span", h("b", who), words.slice(who.length)));
  }));
}

function show(reply, isOther) {
  last = reply;
  put($("key-name"), reply.key);
  put($("key-hash"), `hash ${reply.key_hash.slice(0, 12)}…`);
  $("key-copy").hidden = false;
  $("key-none").hidden = true;
  $("key-all").hidden = false;
  $("key-token").hidden = true;
  fill($("key-says"), [reply.second, reply.limits.map(({ allowed, remaining }) => [allowed, remaining])], sentence);
  showLimits();
  showChart();
  showDecisions();
  showChanges();
  for (const id of ["key-limit", "key-try-limit"]) options($(id), reply.limits.map(({ limit }) => limit));
  $("key-charge").hidden = needsToken() && !knownToken();
  if (isOther) {
    const [first] = $("key-limits").rows;
    const fullest = first?.querySelector("b").textContent;
    if (fullest) for (const id of ["key-limit", "key-try-limit"]) $(id).value = fullest;
    answer("", "Look only changes nothing. A charge counts like any caller’s.");
    if (reply.decisions.some(({ limit }) => limit === fullest)) {
      $("key-of").value = fullest;
      showChart();
    }
    showFields();
  }
  put($("key-follow"), reply.survives_restart ? "all servers follow within a second" : "until this process ends: counted in memory");
  showSentence();
}

// The override.

const DO = { raise: "Other numbers", block: "Block", free: "No limit", none: "By default" };
const ENDS = { 3600: "1 h", 86400: "1 d", at: "a time", "": "no end" };
const FIELDS = {
  token_bucket: [["rate", "New rate, such as 100/s", "text"], ["burst", "New burst", "number"]],
  leaky_bucket: [["rate", "New rate, such as 100/s", "text"], ["capacity", "New capacity", "number"]],
  fixed_window: [["limit", "New limit", "number"]],
  sliding_window: [["limit", "New limit", "number"]],
  sliding_window_counter: [["limit", "New limit", "number"]],
  concurrency: [["limit", "New limit", "number"]],
};

const chosen = (name) => $("key-override").elements[name].value;
const limitOf = () => last.limits.find(({ limit }) => limit === $("key-limit").value);

function radios(box, name, choices) {
  box.append(...Object.entries(choices).map(([value, words], index) => {
    const input = h("input", { type: "radio", name, value });
    input.checked = index === 0;
    return h("label", input, words);
  }));
}

function showFields() {
  const limit = limitOf();
  const fields = (limit && FIELDS[limit.strategy]) ?? [];
  fill($("key-fields"), [limit?.limit, limit?.strategy], () => fields.map(([name, label, kind]) => {
    const input = h("input", { id: `key-${name}-value`, name, type: kind, required: true, autocomplete: "off" });
    if (kind === "number") for (const [what, value] of [["min", 1], ["step", 1], ["inputmode", "numeric"]]) input.setAttribute(what, value);
    // A proposal: twice what the config allows.
    const own = limit.numbers?.[name];
    if (own !== undefined) input.value = kind === "number" ? String(2 * own) : own.replace(/^\d+/, (count) => String(2 * Number(count)));
    return h("div.field", h("label", { for: input.id }, label), input);
  }));
}

function wanted() {
  const limit = limitOf();
  const act = chosen("do");
  const fields = {};
  if (act === "block") fields.blocked = true;
  if (act === "free") fields.unlimited = true;
  if (act === "raise") for (const input of $("key-fields").querySelectorAll("input")) if (input.value) fields[input.name] = input.type === "number" ? Number(input.value) : input.value;
  const ends = chosen("ends");
  const until = act === "none" || ends === "" ? null : ends === "at" ? ($("key-at").value ? new Date($("key-at").value).getTime() / 1000 : null) : Date.now() / 1000 + Number(ends);
  return { limit, act, fields, ends, until };
}

function sentenceOf({ limit, act, fields, until }) {
  if (!limit) return [];
  const what = { raise: fieldsWords(fields) || "other numbers", block: "every request is denied", free: "nothing is limited", none: "what the config says holds again" }[act];
  const when = act === "none" ? "" : until ? `, until ${moment(until)}` : ", with no end";
  return [h("code", limit.limit), " for ", h("code", key), ": ", h("b", what), act === "none" ? "" : ` instead of ${limit.instead_of ?? limit.rule}`, when, ". What it has used stays counted."];
}

function showSentence() {
  const now = wanted();
  const { limit, act, ends } = now;
  const takesNumbers = act === "raise";
  $("key-fields").hidden = !takesNumbers;
  for (const input of $("key-fields").querySelectorAll("input")) input.disabled = !takesNumbers;
  $("key-until").hidden = act === "none";
  $("key-at-field").hidden = ends !== "at" || act === "none";
  $("key-at").required = !$("key-at-field").hidden;
  const isPlain = limit && !FIELDS[limit.strategy];
  fill($("key-sentence"), [key, limit?.limit, limit?.rule, limit?.instead_of, act, now.fields, now.until && Math.round(now.until / 60)], () =>
    (isPlain && takesNumbers ? [`${limit.limit} has no numbers to change: block the key, or lift the limit.`] : sentenceOf(now)));
  put($("key-set"), { raise: "Set override…", block: "Block…", free: "Lift the limit…", none: "Remove override…" }[act]);
  $("key-set").classList.toggle("grave", act === "block");
  $("key-set").disabled = Boolean(isPlain && takesNumbers);
}

async function change({ limit, act, fields, ends, until }) {
  const of = { limit: limit.limit, key };
  const body = { ...of, override: fields, by: "page" };
  if ($("key-reason").value.trim()) body.reason = $("key-reason").value.trim();
  if (ends === "at") body.until = new Date(until * 1000).toISOString();
  else if (ends !== "") body.for_ms = Number(ends) * 1000;
  const answered = act === "none" ? await askAsAdmin("/v1/overrides/remove", { ...of, by: "page" }) : await askAsAdmin("/v1/overrides", body);
  if (!answered) return;
  if (!answered.isOk) {
    put($("sure-problem"), answered.reply.detail ?? "Nothing was changed.");
    return;
  }
  $("sure").close();
  await refresh();
}

function submit(event) {
  event.preventDefault();
  const now = wanted();
  if (!now.limit || !$("key-override").reportValidity()) return;
  const title = { raise: "Change this key?", block: "Block this key?", free: "Lift the limit?", none: "Remove the override?" }[now.act];
  makeSure({ title, words: sentenceOf(now), button: $("key-set").textContent.replace("…", ""), takesToken: needsToken(), work: () => change(now) });
  if (knownToken()) $("sure-token").value = knownToken();
}

function reset() {
  const limit = limitOf();
  if (!limit) return;
  const words = ["What ", strong(key), " was charged under ", strong(limit.limit), " is forgotten; the key is full again."];
  const work = async () => {
    const answered = await askAsAdmin("/v1/reset", { limit: limit.limit, key });
    if (!answered) return;
    if (!answered.isOk) {
      put($("sure-problem"), answered.reply.detail ?? "Nothing was changed.");
      return;
    }
    $("sure").close();
    await refresh();
  };
  makeSure({ title: "Reset this key?", words, button: "Reset this key", takesToken: needsToken(), work });
  if (knownToken()) $("sure-token").value = knownToken();
}

// A charge that is tried.

function answer(first, rest) {
  $("key-answer").replaceChildren(...(first ? [h("b", first), " "] : []), rest);
}

async function tried(path) {
  const { isOk, status, reply } = await ask("POST", path, { limit: $("key-try-limit").value, key, cost: Number($("key-try-cost").value) });
  if (!isOk) {
    answer(`${reply.title ?? "Not done"} (${status}).`, reply.detail ?? "");
    return;
  }
  const [, first, rest] = decisionWords(reply);
  answer(path === "/v1/peek" ? first.replace("Allowed", "Would be allowed").replace("Denied", "Would be denied") : first, rest);
}

function charge() {
  if (!$("key-try").reportValidity()) return;
  const words = [strong(number.format($("key-try-cost").value)), " is charged to ", strong(key), " under ", strong($("key-try-limit").value), ", as a request of a caller would be."];
  const work = async () => {
    await tried("/v1/check");
    $("sure").close();
    await refresh();
  };
  makeSure({ title: "Charge this key?", words, button: "Charge this key", takesToken: false, work });
}

let plot = null;

export function startKey() {
  plot = chart($("key-chart"));
  numbers($("key-numbers"), () => drawn);
  $("key-legend").append(legend([["f1", "allowed"], ["fd", "denied"], ["hd", "would be denied"], ["w", "store down"], ["i", "changed"]]));
  radios($("key-do"), "do", DO);
  radios($("key-ends"), "ends", ENDS);
  for (const [name, { words }] of Object.entries(WHICH)) {
    const button = h("button", { type: "button", "data-which": name, "aria-pressed": String(name === which) }, words);
    button.addEventListener("click", () => {
      which = name;
      showDecisions();
    });
    $("key-which").append(button);
  }
  for (const [name, { name: words }] of Object.entries(RANGES)) {
    const button = h("button", { type: "button", "data-range": name, "aria-pressed": String(name === range) }, words);
    button.addEventListener("click", () => {
      range = name;
      for (const other of $("key-range").children) other.setAttribute("aria-pressed", String(other === button));
      showChart();
      showDecisions();
    });
    $("key-range").append(button);
  }
  $("key-more").addEventListener("click", () => {
    isWhole = !isWhole;
    showDecisions();
  });
  $("key-try").addEventListener("submit", (event) => {
    event.preventDefault();
    tried("/v1/peek").catch(() => answer("No answer.", "The server could not be reached."));
  });
  $("key-charge").addEventListener("click", charge);
  $("key-open").addEventListener("submit", (event) => {
    event.preventDefault();
    open($("key-text").value.trim(), $("key-token").value || knownToken())
      .catch(() => put($("key-problem"), "The server could not be reached."));
  });
  $("key-limit").addEventListener("change", () => { showFields(); showSentence(); });
  $("key-override").addEventListener("input", () => last && showSentence());
  $("key-override").addEventListener("submit", submit);
  $("key-reset").addEventListener("click", reset);
  $("key-of").addEventListener("change", () => last && showChart());
  $("key-copy").addEventListener("click", () => copy($("key-copy"), last.key_hash));
  $("key-csv").addEventListener("click", () => saveCsv("decisions.csv", ["time", "limit", "decision", "cost", "left", "retry_after_ms", "why", "times"],
    last.decisions.map((one) => [new Date(one.at_ms).toISOString(), one.limit, one.what, one.cost, one.left, one.retry_after_ms, one.why, one.times])));
  setInterval(refresh, EVERY_MS);
  $("key-text").focus();
  // A link of the overview names a key by its hash.
  const openLinked = () => {
    const hash = location.hash.slice(1);
    if (!HASH.test(hash)) return;
    $("key-text").value = hash;
    $("key-open").requestSubmit();
  };
  addEventListener("hashchange", openLinked);
  openLinked();
}
