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
  $("answer").dataset.said = kind;
  $("answer").replaceChildren(make("strong", "", first), ` ${rest}`);
}

const left = (said) => `${number.format(said.remaining)} of ${number.format(said.capacity)} left`;
const fullAgain = (said) => (said.reset_after_ms > 0 ? `; full again in ${span(said.reset_after_ms)}.` : ".");

function tellDecision(said) {
  const [of] = said.limits;
  const without = said.degraded ? " Decided by the fallback: the store is down." : "";
  if (said.allowed && of.would_deny) {
    answer("allowed", "Allowed:", `${of.limit} is in shadow mode and would have denied it.${without}`);
  } else if (said.allowed && of.capacity === null) {
    answer("allowed", "Allowed.", `Nothing is counted here.${without}`);
  } else if (said.allowed) {
    const delay = said.delay_ms > 0 ? ` Start after a delay of ${span(said.delay_ms)}.` : "";
    answer("allowed", "Allowed.", left(of) + fullAgain(of) + delay + without);
  } else if (said.retry_after_ms === null) {
    answer("denied", "Denied.", (of.reason === "blocked" ? `${of.limit} blocks this key.` : `The cost is above the capacity of ${of.limit}, ${number.format(of.capacity)}; waiting does not help.`) + without);
  } else {
    answer("denied", "Denied.", `${left(of)}; try again in ${span(said.retry_after_ms)}.${without}`);
  }
}

function asked() {
  return { limit: $("try-limit").value, key: $("try-key").value };
}

/** Does something with the form's key, and tells what went wrong if it does. */
async function withForm(work) {
  if (!$("try").reportValidity()) return;
  try {
    await work();
  } catch {
    answer("problem", "No answer.", "The server could not be reached.");
  }
}

function problem({ status, said }) {
  answer("problem", `${said.title ?? "Not done"} (${status}).`, said.detail ?? "");
}

async function charge() {
  const answered = await ask("POST", "/v1/check", { ...asked(), cost: Number($("try-cost").value) });
  $("sure").close();
  if (answered.isOk) tellDecision(answered.said);
  else problem(answered);
}

async function reset() {
  const answered = await askAsAdmin("/v1/reset", asked());
  if (!answered) return;
  $("sure").close();
  if (!answered.isOk) problem(answered);
  else if (answered.said.reset) answer("allowed", "Reset.", "The key is full again.");
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
  const { limit, key } = asked();
  const answered = await ask("GET", `/v1/status?limit=${encodeURIComponent(limit)}&key=${encodeURIComponent(key)}`);
  const { said } = answered;
  if (!answered.isOk) problem(answered);
  else if (said.capacity === null) answer("allowed", "Nothing is counted here.", "");
  else answer("allowed", `${number.format(said.used)} used.`, left(said) + fullAgain(said));
}));

$("reset").addEventListener("click", () => withForm(() => {
  const { limit, key } = asked();
  const words = ["What ", strong(key), " was charged under ", strong(limit), " is forgotten; the key is full again."];
  makeSure({ title: "Reset this key?", words, button: "Reset this key", takesToken: needsToken(), work: reset });
}));
