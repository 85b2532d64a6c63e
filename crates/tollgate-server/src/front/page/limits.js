// The cards of the limits: what is known of their seconds, drawn, and who is denied most.

import { $, attribute, copy, make, put } from "./nodes.js";
import { choose } from "./try.js";
import { clockTime, number, policyWords, rate, span } from "./words.js";

const SECONDS = 300;
const KINDS = ["allowed", "denied", "would_deny", "fell_back"];
const AVERAGED = 5; // seconds, so that rates do not flicker

export const series = new Map(); // by name: { last, allowed, denied, would_deny, fell_back }

/** Adds the seconds of a snapshot to those that are known. False if some are missing between them. */
export function remember(snapshot) {
  let isWhole = true;
  const names = new Set();
  for (const { limit, seconds } of snapshot.limits) {
    names.add(limit);
    const last = snapshot.second - 1;
    const count = seconds.allowed.length;
    const known = series.get(limit);
    if (count >= SECONDS || !known) {
      const padding = new Array(SECONDS - count).fill(0);
      series.set(limit, { last, ...Object.fromEntries(KINDS.map((kind) => [kind, padding.concat(seconds[kind])])) });
      isWhole &&= count >= SECONDS;
      continue;
    }
    const passed = last - known.last;
    if (passed < 0 || passed > count) isWhole = false;
    const zeros = new Array(Math.min(Math.max(passed, 0), SECONDS)).fill(0);
    for (const kind of KINDS) {
      known[kind] = known[kind].concat(zeros).slice(-SECONDS);
      known[kind].splice(SECONDS - count, count, ...seconds[kind]);
    }
    known.last = last;
  }
  for (const name of series.keys()) if (!names.has(name)) series.delete(name);
  return isWhole;
}

export function average(counts) {
  return counts.slice(-AVERAGED).reduce((sum, count) => sum + count, 0) / AVERAGED;
}

const cards = new Map();

function card(name) {
  const known = cards.get(name);
  if (known) return known;
  const root = $("limit-card").content.cloneNode(true).firstElementChild;
  const find = (selector) => root.querySelector(selector);
  const made = {
    root, find, at: null,
    title: find("h3"), tags: find(".tags"), policy: find(".policy"),
    allowed: find("dd.allowed"), denied: find("dd.denied"), deniedWord: find(".denied-word"),
    chart: find(".chart"), readout: find(".readout"), figure: find("figure"),
    empty: find(".empty"), code: find("code"), nobody: find(".nobody"), offenders: find(".offenders"), rows: find("tbody"),
  };
  root.id = `limit-${name}`;
  made.title.id = `title-${name}`;
  root.setAttribute("aria-labelledby", made.title.id);
  put(made.title, name);
  put(made.code, `curl -s ${location.origin}/v1/check -H 'content-type: application/json' -d '{"limit":"${name}","key":"user:42"}'`);
  find(".copy").addEventListener("click", (event) => copy(event.currentTarget, made.code.textContent));
  made.chart.addEventListener("pointermove", (event) => {
    const box = made.chart.getBoundingClientRect();
    made.at = Math.min(SECONDS - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * SECONDS)));
    draw(made, name);
  });
  made.chart.addEventListener("pointerleave", () => {
    made.at = null;
    draw(made, name);
  });
  cards.set(name, made);
  return made;
}

function showTags(element, tags) {
  const text = tags.map(([word]) => word).join();
  if (element.dataset.tags === text) return;
  element.dataset.tags = text;
  element.replaceChildren(...tags.map(([word, isBad]) => make("span", isBad ? "tag bad" : "tag", word)));
}

/** Brings the card of a limit up to date. */
export function showLimit(limit, second) {
  const shown = card(limit.limit);
  const counts = series.get(limit.limit);
  put(shown.policy, policyWords(limit));
  const fellBack = average(counts.fell_back) > 0;
  showTags(shown.tags, [...(limit.shadow ? [["shadow", false]] : []), ...(fellBack ? [[`falling back ${limit.fallback}`, true]] : [])]);
  const denied = average(limit.shadow ? counts.would_deny : counts.denied);
  put(shown.allowed, rate(average(counts.allowed)));
  put(shown.denied, rate(denied));
  shown.denied.classList.toggle("some", denied > 0);
  put(shown.deniedWord, limit.shadow ? "would be denied/s" : "denied/s");
  const isIdle = KINDS.every((kind) => counts[kind].every((count) => count === 0));
  shown.empty.hidden = !isIdle;
  shown.figure.hidden = isIdle;
  if (!isIdle) draw(shown, limit.limit);
  showOffenders(shown, limit, second);
  return shown.root;
}

/** The outline of stacked counts, from the sum below to the sum with these: a step for each second, and nothing in between. */
function area(below, counts, top) {
  const y = (value) => (71 - (value / top) * 70).toFixed(1);
  const upper = counts.map((count, x) => `V${y(below[x] + count)}H${x + 1}`);
  const lower = below.map((count, x) => `V${y(count)}H${x}`).reverse();
  return `M0 71${upper.join("")}${lower.join("")}Z`;
}

/** A round number that is not less. */
function ceiling(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 4, 5, 8, 10].map((step) => step * size).find((step) => step >= value);
}

function draw(shown, name) {
  const counts = series.get(name);
  if (!counts) return;
  const sums = (one, other) => one.map((count, x) => count + other[x]);
  const zero = new Array(SECONDS).fill(0);
  const refused = sums(counts.denied, counts.would_deny);
  const most = Math.max(...sums(refused, counts.allowed));
  const top = ceiling(most);
  const has = (list) => list.some((count) => count > 0);
  attribute(shown.find(".area-denied"), "d", has(counts.denied) ? area(zero, counts.denied, top) : "");
  attribute(shown.find(".area-would"), "d", has(counts.would_deny) ? area(counts.denied, counts.would_deny, top) : "");
  attribute(shown.find(".area-allowed"), "d", area(refused, counts.allowed, top));
  const { at } = shown;
  attribute(shown.find(".cursor"), "d", at === null ? "" : `M${at + 0.5} 0V72`);
  const said = (x) => {
    const words = [`${number.format(counts.allowed[x])} allowed`];
    if (counts.denied[x] > 0) words.push(`${number.format(counts.denied[x])} denied`);
    if (counts.would_deny[x] > 0) words.push(`${number.format(counts.would_deny[x])} would be denied`);
    return words.join(", ");
  };
  put(shown.readout, at === null ? `peak ${rate(most)}/s` : `${clockTime(counts.last - (SECONDS - 1 - at))}: ${said(at)}`);
  const total = (list) => number.format(list.reduce((sum, count) => sum + count, 0));
  attribute(shown.chart, "aria-label",
    `${name}, last five minutes: ${total(counts.allowed)} allowed, ${total(counts.denied)} denied, ${total(counts.would_deny)} would have been denied`);
}

/** When a key is full again; one that was denied by the fallback has no such time. */
function resetWords({ capacity, reset_after_ms }, resetIn) {
  if (capacity === 0) return "never";
  if (reset_after_ms === 0) return "–";
  return resetIn > 0 ? span(Math.ceil(resetIn / 1000) * 1000) : "now";
}

function showOffenders(shown, limit, second) {
  const { offenders } = limit;
  shown.offenders.hidden = offenders.length === 0;
  shown.nobody.hidden = offenders.length > 0 || !shown.empty.hidden;
  put(shown.nobody, limit.shadow ? "Nobody would have been denied in the last five minutes." : "Nobody was denied in the last five minutes.");
  put(shown.offenders.caption, limit.shadow ? "Would be denied most, last 5 minutes" : "Denied most, last 5 minutes");
  const rows = shown.rows;
  const top = offenders.slice(0, 5);
  while (rows.rows.length > top.length) rows.deleteRow(-1);
  while (rows.rows.length < top.length) {
    const row = rows.insertRow();
    const button = make("button", "plain");
    button.type = "button";
    button.addEventListener("click", () => choose(limit.limit, button));
    row.insertCell().append(button);
    for (let cell = 0; cell < 3; cell += 1) row.insertCell();
  }
  top.forEach((one, index) => {
    const [who, denials, left, resets] = rows.rows[index].cells;
    const button = who.firstElementChild;
    const isKey = one.key !== null;
    if (button.dataset.hash !== one.hash) {
      button.dataset.hash = one.hash;
      button.dataset.key = one.key ?? "";
      put(button, isKey ? one.key : `${one.hash.slice(0, 12)}…`);
      attribute(button, "title", isKey ? "Try this key" : `Copy ${one.hash}, by which the log names this key`);
    }
    put(denials, rate(one.denials));
    const resetIn = one.last_denied * 1000 + one.reset_after_ms - second * 1000;
    put(left, resetIn > 0 && one.capacity > 0 ? `${rate(one.remaining)} of ${rate(one.capacity)}` : "–");
    put(resets, resetWords(one, resetIn));
  });
}

/** Drops the cards of limits that there are no longer. */
export function dropCards() {
  for (const name of cards.keys()) if (!series.has(name)) cards.delete(name);
}
