// Calls to the API, and the dialog that asks before a change.
//
// The admin token stays in its field, and goes nowhere but to the server.

import { $, make, put } from "./nodes.js";

let tokenIsNeeded = false;
let known = ""; // the token that an admin call was answered to

export const needsToken = () => tokenIsNeeded;
export const setNeedsToken = (isNeeded) => { tokenIsNeeded = isNeeded; };

/** The admin token, if it was shown to be right on this page; and forgets it. */
export const knownToken = () => known;
export const forgetToken = () => { known = ""; };
export const tokenWorked = (token) => { known = token ?? ""; };

/** Asks the API. */
export async function ask(method, path, body, token) {
  const headers = body ? { "content-type": "application/json" } : {};
  if (token) headers.authorization = `Bearer ${token}`;
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  const reply = await response.json().catch(() => ({}));
  return { status: response.status, isOk: response.ok, reply };
}

export const strong = (text) => make("strong", "", text);

let whenSure = null;

/** Asks before it is done; what is done says itself when the dialog may close. `fields` are asked for besides. */
export function makeSure({ title, words, button, takesToken, work, fields = [] }) {
  whenSure = work;
  put($("sure-title"), title);
  $("sure-words").replaceChildren(...words);
  $("sure-fields").replaceChildren(...fields);
  put($("sure-yes"), button);
  put($("sure-problem"), "");
  $("sure-token-field").hidden = !takesToken;
  $("sure-token").required = takesToken;
  $("sure").showModal();
  (fields.length ? $("sure-fields").querySelector("select, input") : takesToken ? $("sure-token") : $("sure-no")).focus();
}

/** Makes an admin call from the dialog. What it answered, once it was done; null if the token was wrong, which the dialog says. */
export async function askAsAdmin(path, body, method = "POST") {
  const token = $("sure-token").value;
  const answered = await ask(method, path, body, token);
  if (answered.status === 401) {
    put($("sure-problem"), "That is not the admin token. Nothing was changed.");
    $("sure-token").select();
    return null;
  }
  if (answered.isOk) known = token;
  return answered;
}

$("sure-no").addEventListener("click", () => $("sure").close());

$("sure-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await whenSure();
  } catch {
    put($("sure-problem"), "The server could not be reached.");
  }
});
