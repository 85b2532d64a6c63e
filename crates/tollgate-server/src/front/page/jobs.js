// Background jobs: what their limits have counted, which jobs wait and until when, what is closed. Fed by /v1/jobs, which reads the jobs' database, so
// it is that of all workers. Times are the database's, shown in this browser's zone.

import { notice } from "./alerts.js";
import { ask, askAsAdmin, forgetToken, knownToken, makeSure, needsToken, strong } from "./ask.js";
import { chart, legend, meter, numbers } from "./chart.js";
import { $, attribute, each, fill, h, options, put } from "./nodes.js";
import { clock, dateTime, moment, number, plural, rate, span } from "./words.js";

const EVERY_MS = 1000;
const SHOWN = 15;
const ALL = "all keys";
const MINUTES = 60;

let last = null; // what was read last
let drawn = null; // what the chart shows

const when = (ms) => (last.now_ms + ms) / 1000;
const faint = (words) => h("span.faint", words);
const sub = (words) => h("span.sub", words);
const keyName = (key) => (key.startsWith("shared") ? "keys of shared limits" : key);

// The limits.

function ruleWords({ limits, shared, split_by }) {
  const rules = limits.map(({ rule }) => rule);
  if (shared.length) rules.push(`with ${shared.join(", ")}`);
  if (split_by) rules.push(`for each ${split_by}`);
  return rules.join(", ");
}

function used(key) {
  if (key.split_by) return faint(`each ${key.split_by} is counted by itself`);
  if (!key.limits.length) return faint("only shared limits");
  if (key.limits.some(({ count }) => count === null)) return faint("not known: the store cannot be asked");
  return key.limits.map((limit) => {
    const share = shareOf(limit);
    const words = `${number.format(limit.count)} of ${number.format(limit.capacity)}`;
    const bar = meter([[share >= 1 ? "fd" : "f2", share]], words, `${limit.rule}: ${words} used`);
    bar.title = limit.rule;
    return bar;
  });
}

const shareOf = ({ count, capacity }) => (capacity === 0 ? 0 : (count ?? 0) / capacity);

/** The limit that is nearest to holding jobs up. */
const fullest = (limits) => limits.reduce((most, one) => (most && shareOf(most) >= shareOf(one) ? most : one), undefined);

/** How often jobs were held up, by what became of them. */
const heldWords = (hour) => (hour ? [[hour.delayed, "delayed"], [hour.rejected, "failed"], [hour.skipped, "skipped"]].filter(([count]) => count > 0) : []);

function keyRow({ key }) {
  const cells = ["td.all", "td.use.all", ...Array(7).fill("td")].map((what) => h(what));
  ["used", "resets in", "running", "waiting", "next slot", "backlog done", "if exceeded", "held up, 1 h"]
    .forEach((label, index) => cells[index + 1].setAttribute("data-l", label));
  for (const index of [2, 3, 4, 5, 6, 8]) cells[index].classList.add("num");
  return h("tr", { "data-key": key }, cells);
}

function showKey(row, key) {
  const [name, use, resets, running, waiting, next, done, behaviour, held] = row.cells;
  const first = fullest(key.limits);
  fill(name, [key.key, key.closed_ms !== null, key.shadow, ruleWords(key)], () => [
    h("b.mono", key.key), " ",
    key.closed_ms !== null && h("span.tag.warn", "closed"), " ", key.shadow && h("span.tag.dash", "shadow"),
    sub(ruleWords(key))]);
  fill(use, [key.limits.map(({ count, capacity, rule }) => [count, capacity, rule]), key.split_by], () => used(key));
  const reset = !first || first.count === null ? faint("–")
    : first.concurrency ? faint("as they end")
      : first.resets_after_ms === 0 ? faint("–") : span(first.resets_after_ms);
  fill(resets, [first?.concurrency, first?.count, first?.resets_after_ms], () => reset);
  fill(running, key.running, () => (key.running === null ? faint("–") : number.format(key.running)));
  fill(waiting, key.waiting, () => (key.waiting ? h("b", number.format(key.waiting)) : faint("0")));
  const isWaiting = key.waiting > 0;
  fill(next, isWaiting ? [last.now_ms, key.next_slot_ms] : null, () => (isWaiting ? [clock(when(key.next_slot_ms), true), sub(`in ${span(key.next_slot_ms)}`)] : faint(key.closed_ms === null ? "now" : `in ${span(key.closed_ms)}`)));
  fill(done, isWaiting ? [last.now_ms, key.backlog_ends_ms] : null, () => (isWaiting ? [h("b", moment(when(key.backlog_ends_ms))), sub(`in ${span(key.backlog_ends_ms)}`)] : faint("–")));
  put(behaviour, key.on_exceeded);
  // On a small screen what says nothing is left out.
  for (const [cell, isSomething] of [[running, key.running !== null], [waiting, isWaiting], [next, isWaiting || key.closed_ms !== null], [done, isWaiting], [held, heldWords(key.hour).length > 0], [resets, first && first.count !== null]]) {
    cell.classList.toggle("hide-small", !isSomething);
  }
  fill(held, key.hour, () => {
    if (!key.hour) return faint("–");
    const words = heldWords(key.hour);
    return words.length ? words.map(([count, what], index) => [index > 0 && h("br"), number.format(count), " ", faint(what)]) : faint("0");
  });
}

function showGroup(body, title, keys) {
  if (!body.head) {
    body.head = h("tr.group", h("th", { colspan: 9, scope: "rowgroup" }, title));
  }
  body.hidden = keys.length === 0;
  each(body, [{ key: "" }, ...keys], ({ key }) => key, (item) => (item.key ? keyRow(item) : body.head), (row, item) => { if (item.key) showKey(row, item); });
}

// The line.

function lineRow() {
  const cells = ["td.num", "td.mono", "td.mono", "td", "td.num", "td.num", "td"].map((what) => h(what));
  cells[4].setAttribute("data-l", "waited");
  cells[5].setAttribute("data-l", "slot");
  return h("tr", cells);
}

function countOf(limit) {
  const counted = last.keys.flatMap(({ limits }) => limits).find((one) => one.limit === limit);
  return counted && counted.count !== null ? `: ${number.format(counted.count)} of ${number.format(counted.capacity)}` : "";
}

function showLine() {
  const chosen = $("jobs-show").value || ALL;
  options($("jobs-show"), [ALL, ...new Set(last.line.map(({ key, limit }) => key ?? limit).filter(Boolean))]);
  const isShown = ({ key, limit }) => chosen === ALL || (key ?? limit) === chosen;
  const placed = last.line.map((job, index) => ({ ...job, place: index + 1 })).filter(isShown).slice(0, SHOWN);
  each($("jobs-line"), placed, ({ job }) => job, lineRow, (row, job) => {
    const [place, id, type, queue, waited, slot, why] = row.cells;
    put(place, number.format(job.place));
    put(id, job.job.length > 10 ? `…${job.job.slice(-8)}` : job.job);
    attribute(id, "title", job.job);
    put(type, job.job_type);
    put(queue, job.queue);
    put(waited, span(Math.max(1000, Math.floor(job.waited_ms / 1000) * 1000)));
    fill(slot, [last.now_ms, job.slot_ms], () => [h("b", clock(when(job.slot_ms), true)), faint(` in ${span(job.slot_ms)}`)]);
    const count = countOf(job.limit);
    fill(why, [job.key, job.limit, count], () => (job.limit ? [h("span.mono", job.key ?? job.limit), faint(count)] : faint("its turn")));
  });
  $("jobs-line-table").hidden = last.waiting === 0;
  $("jobs-ids").hidden = last.shows_ids || last.waiting === 0;
  put($("jobs-line-count"), last.waiting === 0 ? "nobody waits" : `next ${placed.length} of ${sumWords()}, each with its own slot`);
}

const sumWords = () => `${last.is_cut ? "more than " : ""}${number.format(last.waiting)}`;

// Closed keys, and closing and opening them.

function closedWords({ by, values }) {
  return values > 0 ? `${by}; ${plural(values, "value")} of the field that splits it` : by;
}

function closedRow(item) {
  const button = h("button.quiet", { type: "button" }, "Open…");
  button.addEventListener("click", () => askToOpen(button.item));
  const cells = [h("td.all"), h("td.num", { "data-l": "waiting" }), h("td.num", { "data-l": "opens in" }), h("td.num", button)];
  button.setAttribute("aria-label", `Open ${keyName(item.key)}…`);
  return h("tr", { "data-key": item.key }, cells);
}

function showClosed() {
  $("jobs-closed-table").hidden = last.closed.length === 0;
  each($("jobs-closed"), last.closed, ({ key }) => key, closedRow, (row, item) => {
    fill(row.cells[0], [item.key, closedWords(item)], () => [h("b.mono", keyName(item.key)), sub(closedWords(item))]);
    put(row.cells[1], number.format(item.waiting));
    put(row.cells[2], span(Math.ceil(item.opens_in_ms / 1000) * 1000));
    row.cells[3].firstElementChild.item = item;
    row.cells[3].firstElementChild.hidden = item.key === "shared";
  });
  const [first] = last.closed;
  const waiting = last.closed.reduce((sum, one) => sum + one.waiting, 0);
  notice("jobs-closed",
    last.closed.length === 1 ? `${keyName(first.key)} is closed until ${moment(when(first.opens_in_ms), true)}.` : `${last.closed.length} keys are closed.`,
    first ? `${last.closed.length === 1 ? `${closedWords(first)}. ` : ""}${plural(waiting, "job")} ${waiting === 1 ? "waits" : "wait"}; no attempt is used up.` : null,
    { isAmber: true, link: { words: "Closed keys", href: "#closed" } });
}

// What was held up last. Workers write it down every few seconds.

const heldUpWords = ({ behavior, wait_ms }) => ({ delay: `delayed ${span(wait_ms)}`, skip: "skipped", reject: "failed" })[behavior] ?? behavior;

function showLately() {
  $("jobs-lately-table").hidden = last.lately.length === 0;
  $("jobs-lately-none").hidden = last.lately.length > 0;
  const rows = last.lately.map((one, index) => ({ ...one, index, at: Math.round((last.now_ms - one.ago_ms) / 1000) }));
  each($("jobs-lately"), rows, ({ index }) => index, () => h("tr", h("td.nowrap"), h("td.mono"), h("td")), (row, one) => {
    put(row.cells[0], clock(one.at, true));
    put(row.cells[1], one.job_type);
    fill(row.cells[2], [one.behavior, one.wait_ms, one.key], () => [
      one.behavior === "reject" ? h("b.deny", heldUpWords(one)) : heldUpWords(one), faint(" by "), h("span.mono", keyName(one.key))]);
  });
}

function say(words) {
  put($("jobs-said"), words);
}

function done(answered, words) {
  if (!answered) return;
  $("sure").close();
  say(answered.isOk ? words(answered.reply) : `${answered.reply.title ?? "Not done"}: ${answered.reply.detail ?? ""}`);
  read();
}

const openedWords = ({ key }) => ({ opened, called }) => {
  if (!opened) return `${key} was not closed any more.`;
  return called === null ? `${key} is open. Its jobs look again when their slot or their longest sleep has passed.` : `${key} is open. ${plural(called, "job")} ${called === 1 ? "is" : "are"} called.`;
};

function askToOpen(item) {
  makeSure({
    title: `Open ${item.key} now?`,
    words: ["Its jobs start again at the pace of its limits, on all workers. ", strong(plural(item.waiting, "job")), ` ${item.waiting === 1 ? "waits" : "wait"}; the first of them are called at once.`],
    button: "Open",
    takesToken: needsToken(),
    work: async () => done(await askAsAdmin("/v1/jobs/open", { key: item.key, values: true }), openedWords(item)),
  });
}

function askToShowIds() {
  makeSure({
    title: "Show the ids of jobs?",
    words: ["Ids, and what admins wrote when they closed a key, are shown in this tab for as long as it is open. Without the token, hashes of the ids are."],
    button: "Show",
    takesToken: needsToken(),
    work: async () => {
      const answered = await askAsAdmin("/v1/jobs", null, "GET");
      if (!answered) return;
      $("sure").close();
      if (answered.isOk) show(answered.reply);
    },
  });
}

function field(id, label, control) {
  control.id = id;
  return h("div.field", h("label", { for: id }, label), control);
}

function askToClose() {
  const key = h("select");
  options(key, (last?.keys ?? []).map((one) => one.key));
  const wait = h("select", [["5 min", 300], ["30 min", 1800], ["1 h", 3600], ["6 h", 21600], ["1 d", 86400]].map(([words, seconds]) => h("option", { value: seconds }, words)));
  const reason = h("input", { maxlength: 120, autocomplete: "off", placeholder: "provider maintenance" });
  makeSure({
    title: "Close a key?",
    words: ["No job that is charged to it starts, on any worker, until it is opened or its time has passed. Jobs keep their places and use up no attempt; running ones go on."],
    fields: [field("close-key", "Key", key), field("close-for", "For", wait), field("close-reason", "Why, for others who look (optional)", reason)],
    button: "Close",
    takesToken: needsToken(),
    work: async () => {
      const body = { key: key.value, for_ms: Number(wait.value) * 1000 };
      if (reason.value) body.reason = reason.value;
      done(await askAsAdmin("/v1/jobs/close", body), () => `${key.value} is closed for ${span(Number(wait.value) * 1000)}.`);
    },
  });
}

// The whole: the chart, and when the backlog will be done.

/** How many run, where that is limited: under the limit of all jobs, else by type, else by queue. A job is of one type and one queue. */
function runningWords() {
  for (const isOf of [(key) => key === "global", (key) => key.startsWith("job:"), (key) => key.startsWith("queue:")]) {
    const counts = last.keys.filter(({ key, running }) => isOf(key) && running !== null).map(({ running }) => running);
    if (counts.length) return number.format(counts.reduce((sum, count) => sum + count, 0));
  }
  return "–";
}

function showDone() {
  const isWaiting = last.waiting > 0;
  put($("jobs-done-at"), isWaiting ? moment(when(last.backlog_ends_ms)) : "nothing waits");
  put($("jobs-done-in"), isWaiting ? `in ${span(last.backlog_ends_ms)}` : "");
  const [most, next] = last.holds;
  const rule = most && last.keys.flatMap(({ limits }) => limits).find((one) => one.limit === most.limit);
  fill($("jobs-held"), [most, next, rule?.rule, last.now_ms], () => (!most ? "Every job may start at once." : [
    "Held up most by ", h("span.mono", most.key ?? most.limit), rule ? ` (${rule.rule})` : "", `: ${plural(most.jobs, "job")} ${most.jobs === 1 ? "waits" : "wait"} for it. `,
    next ? `All else is done by ${moment(when(next.ends_ms))}.` : "",
    rule?.concurrency ? " When running jobs end is not known, so this is an estimate." : ""]));
  put($("jobs-sum-waiting"), sumWords());
  put($("jobs-sum-running"), runningWords());
  put($("jobs-sum-next"), isWaiting ? span(last.next_slot_ms) : "–");
  const facts = [["Longest wait so far", last.longest_wait_ms === null ? "–" : span(last.longest_wait_ms)],
    ["Closed keys", number.format(last.closed.length)]];
  const { hour } = last;
  if (hour) facts.unshift(["Started, last hour", number.format(hour.started)], ["Delayed, last hour", number.format(hour.delayed)], ["Failed by a limit", number.format(hour.rejected)], ["Skipped", number.format(hour.skipped)]);
  const { workers } = last;
  if (workers) facts.push(["Workers", workers.known === workers.heard_from ? `${number.format(workers.known)}, all heard from` : `${number.format(workers.heard_from)} of ${number.format(workers.known)} heard from`]);
  fill($("jobs-facts"), facts, () => facts.map(([name, value]) => [h("dt", name), h("dd", value)]));
}

const plot = chart($("jobs-chart"));

/** The past in minutes, and then the forecast on the same axis: as far as the backlog goes, and no shorter than ten minutes. */
function showChart() {
  const now = last.now_ms / 1000;
  const isWaiting = last.waiting > 0;
  const isEmpty = !isWaiting && last.past.every(({ waiting }) => waiting === 0);
  $("jobs-none").hidden = !isEmpty;
  $("jobs-chart").hidden = isEmpty;
  $("jobs-numbers").hidden = isEmpty;
  $("jobs-legend").hidden = isEmpty;
  if (isEmpty) return;
  const ahead = isWaiting ? last.backlog_ends_ms / 1000 : 0;
  const before = last.past.length ? Math.min(3600, Math.max(60, now - last.past[0].at)) : 60;
  const step = Math.max(1, (before + Math.max(ahead * 1.05, 60)) / 96);
  const t0 = now - Math.ceil(before / step) * step;
  const count = Math.ceil((before + Math.max(ahead * 1.05, 60)) / step) + 1;
  const past = [];
  const plan = [];
  for (let index = 0; index < count; index += 1) {
    const at = t0 + index * step;
    if (at < now - 1e-6) {
      const known = last.past.findLast((one) => one.at <= at + step);
      const isLast = at + step >= now - 1e-6;
      past.push(isLast ? last.waiting : known && at - known.at < 120 ? known.waiting : null);
      plan.push(isLast && isWaiting ? last.waiting : null);
    } else {
      past.push(null);
      plan.push(isWaiting ? waitingAt((at + step / 2 - now) * 1000) : null);
    }
  }
  const events = last.closed.map(({ key, by, opens_in_ms }) => ({ kind: "w", from: now, to: now + opens_in_ms / 1000, label: `${keyName(key)} closed`, long: `${keyName(key)} is closed, ${by}` }));
  drawn = {
    label: `Waiting jobs: ${number.format(last.waiting)} now${isWaiting ? `, none at ${moment(when(last.backlog_ends_ms))} if nothing new comes` : ""}`,
    t0, step, now, events, hasLane: true, height: innerWidth < 800 ? 200 : 262, y: rate,
    mark: isWaiting ? { at: now + ahead, label: `done ${moment(now + ahead)}` } : null,
    series: [{ name: "waiting", kind: "f1", values: past }, { name: "if nothing new comes", kind: "line.l2.dashed", isLine: true, values: plan }],
  };
  plot.update(drawn);
}

function waitingAt(ms) {
  const { step_ms, waiting } = last.forecast;
  if (ms >= last.backlog_ends_ms || !waiting.length) return 0;
  const place = ms / Math.max(1, step_ms);
  const low = Math.floor(place);
  const [from, to] = [waiting[Math.min(low, waiting.length - 1)], waiting[Math.min(low + 1, waiting.length - 1)]];
  return from + (to - from) * (place - low);
}

function show(answer) {
  const { database } = answer;
  const isUp = database.state === "up";
  notice("jobs-database", "The jobs' database cannot be read.",
    database.state === "down" ? `Since ${dateTime(database.since)}: ${database.problem}. Limits are decided as before.${last ? " What is shown is as it was then." : ""}` : null, { isAmber: true });
  notice("jobs-configured", "There are no limits on jobs.", answer.configured ? null : "The config has no section [jobs].", { isAmber: true });
  $("view-jobs").classList.toggle("stale", !isUp);
  put($("jobs-counted"), answer.store === "memory" ? "counted in each process by itself, so not of all workers: use a shared store" : `counted in ${answer.store === "postgres" ? "PostgreSQL" : "Redis"}, all workers together`);
  $("jobs-close").disabled = !isUp;
  if (!isUp) return;
  last = answer;
  showGroup($("jobs-global"), "Everything", last.keys.filter(({ key }) => key === "global"));
  showGroup($("jobs-queues"), "Queues", last.keys.filter(({ key }) => key.startsWith("queue:")));
  showGroup($("jobs-types"), "Types", last.keys.filter(({ key }) => key.startsWith("job:")));
  $("jobs-more").hidden = last.more_keys === 0;
  put($("jobs-more"), `and ${plural(last.more_keys, "key")} more`);
  showDone();
  showChart();
  showLine();
  showClosed();
  showLately();
}

let isReading = false;

async function read() {
  if (isReading || document.hidden) return;
  isReading = true;
  try {
    const { status, isOk, reply } = await ask("GET", "/v1/jobs", null, knownToken());
    if (status === 401) forgetToken();
    if (isOk) show(reply);
  } catch {
    // The bar says that the connection is lost.
  } finally {
    isReading = false;
  }
}

export function startJobs() {
  $("jobs-legend").append(legend([["f1", "waiting"], ["line.l2.dashed", "if nothing new comes"], ["w", "closed"]]));
  numbers($("jobs-numbers"), () => drawn);
  $("jobs-close").addEventListener("click", askToClose);
  $("jobs-ids").addEventListener("click", askToShowIds);
  $("jobs-show").addEventListener("change", () => last && showLine());
  put($("foot-more"), " · Also: tollgate jobs status --config FILE --json");
  read();
  setInterval(read, EVERY_MS);
}
