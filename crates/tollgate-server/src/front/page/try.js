// The form: charge a key, look at it, reset it, and say in words what came of it.

import { ask, askAsAdmin, makeSure, needsToken, strong } from "./ask.js";
import { $, copy, make, options } from "./nodes.js";
import { number, span } from "./words.js";

/** Offers the limits that there are. */
export function offer({ limits }) {
  options($("try-limit"), limits.filter(({ ad_hoc }) => !ad_hoc).map(({ limit }) => limit));
}

/** A key of the table goes into the form; a hash, and a key whose limit is not of the policy, goes to the clipboard. */
export function choose(limit, button) {
  if (!button.dataset.key) {
    copy(button, button.dataset.hash);
    return;
  }
  if (![...$("try-limit").options].some(({ value }) => value === limit)) {
    copy(button, button.dataset.key);
    return;
  }
  $("try-limit").value = limit;
  $("try-key").value = button.dataset.key;
  $("try-key").focus();
  $("try").scrollIntoView({ block: "center" });
}

function answer(kind, first, rest) {
  $("answer").dataset.kind = kind;
  $("answer").replaceChildren(make("strong", "", first), ` ${rest}`);
}

const left = (reply) => `${number.format(reply.remaining)} of ${number.format(reply.capacity)} left`;
const fullAgain = (reply) => (reply.reset_after_ms > 0 ? `; full again in ${span(reply.reset_after_ms)}.` : ".");

/** What a decision says, as `[kind, first words, the rest]`. */
export function decisionWords(reply) {
  const [of] = reply.limits;
  const without = reply.degraded ? " Decided by the fallback: the store is down." : "";
  if (reply.allowed && of.would_deny) {
    return ["allowed", "Allowed:", `${of.limit} is in shadow mode and would have denied it.${without}`];
  }
  if (reply.allowed && of.capacity === null) return ["allowed", "Allowed.", `Nothing is counted here.${without}`];
  if (reply.allowed) {
    const delay = reply.delay_ms > 0 ? ` Start after a delay of ${span(reply.delay_ms)}.` : "";
    return ["allowed", "Allowed.", left(of) + fullAgain(of) + delay + without];
  }
  if (reply.retry_after_ms === null) {
    return ["denied", "Denied.", (of.reason === "blocked" ? `${of.limit} blocks this key.` : `The cost is above the capacity of ${of.limit}, ${number.format(of.capacity)}; waiting does not help.`) + without];
  }
  return ["denied", "Denied.", `${left(of)}; try again in ${span(reply.retry_after_ms)}.${without}`];
}

function asked() {
  return { limit: $("try-limit").value, key: $("try-key").value };
}

/** Does something with the form's key, and shows what went wrong if it fails. */
async function withForm(work) {
  if (!$("try").reportValidity()) return;
  try {
    await work();
  } catch {
    answer("problem", "No answer.", "The server could not be reached.");
  }
}

function problem({ status, reply }) {
  answer("problem", `${reply.title ?? "Not done"} (${status}).`, reply.detail ?? "");
}

async function charge() {
  const answered = await ask("POST", "/v1/check", { ...asked(), cost: Number($("try-cost").value) });
  $("sure").close();
  if (answered.isOk) answer(...decisionWords(answered.reply));
  else problem(answered);
}

async function reset() {
  const answered = await askAsAdmin("/v1/reset", asked());
  if (!answered) return;
  $("sure").close();
  if (!answered.isOk) problem(answered);
  else if (answered.reply.reset) answer("allowed", "Reset.", "The key is full again.");
  else answer("allowed", "Nothing to reset:", "this key has no counters.");
}

$("try").addEventListener("submit", (event) => {
  event.preventDefault();
  withForm(() => {
    const { limit, key } = asked();
    const words = [strong(number.format($("try-cost").value)), " is charged to ", strong(key), " under ", strong(limit), ", as a request of a caller would be."];
    makeSure({ title: "Charge this key?", words, button: "Charge this key", takesToken: false, work: charge });
  });
});

$("look").addEventListener("click", () => withForm(async () => {
  const answered = await ask("POST", "/v1/status", asked());
  const { reply } = answered;
  if (!answered.isOk) problem(answered);
  else if (reply.capacity === null) answer("allowed", "Nothing is counted here.", "");
  else answer("allowed", `${number.format(reply.used)} used.`, left(reply) + fullAgain(reply));
}));

$("reset").addEventListener("click", () => withForm(() => {
  const { limit, key } = asked();
  const words = ["What ", strong(key), " was charged under ", strong(limit), " is forgotten; the key is full again."];
  makeSure({ title: "Reset this key?", words, button: "Reset this key", takesToken: needsToken(), work: reset });
}));
