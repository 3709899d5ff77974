// The chat page: what was said, what is asked for, and one answer in progress at most.

import { Answer, element } from "./answer.js";
import { ApiError, listModels, storeKey, storedKey, streamChat } from "./api.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "n"];
const RETRY_MS = 2000;

const at = (id) => document.getElementById(id);
const settings = at("settings");
const log = at("log");
const text = at("text");

/** Turns as the API takes them; an assistant's content is the answer that was picked. */
let messages = [];
/** Aborts the answer in progress, or null. */
let running = null;

// ---------------------------------------------------------------- settings

at("key").value = storedKey();
at("key").addEventListener("change", () => {
  storeKey(at("key").value);
  loadModels();
});
at("toggle").addEventListener("click", () => showSettings(!("open" in settings.dataset)));
settings.addEventListener("submit", (event) => event.preventDefault());

function showSettings(open) {
  settings.toggleAttribute("data-open", open);
  at("toggle").setAttribute("aria-expanded", String(open));
}

async function loadModels() {
  try {
    const models = await listModels(at("key").value);
    at("model").replaceChildren(...models.map((model) => new Option(model.id)));
    notify("");
  } catch (error) {
    notify(explain(error));
    if (error instanceof ApiError && error.status === 401) {
      showSettings(true);
      at("key").focus();
    } else {
      setTimeout(loadModels, RETRY_MS); // it is still loading, or being started again
    }
  }
}

function request() {
  const system = at("system").value.trim();
  const body = {
    model: at("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    return_token_ids: true, // an event may hold several tokens; they are counted for the figures
  };
  for (const name of NUMBERS) {
    const { value } = settings.elements[name];
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

// ---------------------------------------------------------------- a turn

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  notify("");
  text.focus();
});

async function ask() {
  const content = text.value;
  if (running || !content.trim()) return;
  if (!settings.checkValidity()) {
    showSettings(true);
    settings.reportValidity();
    return;
  }
  const conversation = messages;
  messages.push({ role: "user", content });
  text.value = "";
  at("welcome").hidden = true;
  notify("");
  const own = element("div", "own");
  own.append(element("div", "", content));
  log.append(own);
  running = new AbortController();
  busy(true);
  let said = false;
  try {
    said = await answer(request(), running.signal);
  } finally {
    running = null;
    busy(false);
  }
  if (!said && conversation === messages) {
    // Nothing came: the question is not part of what was said, and can be sent again.
    messages.pop();
    own.classList.add("failed");
    if (!text.value) text.value = content;
  }
}

/** Shows the answers to `body` as they come; whether there is anything to go on from. */
async function answer(body, signal) {
  const conversation = messages;
  const turn = element("div", "answers");
  const sent = performance.now();
  const answers = Array.from({ length: body.n ?? 1 }, () => new Answer(sent));
  turn.append(...answers.map((one) => one.element));
  log.append(turn);
  scroll(true);
  let fault = "";
  try {
    for await (const event of streamChat(body, at("key").value, signal)) {
      for (const choice of event.choices) {
        const one = answers[choice.index];
        one.take(choice.delta.content ?? "", choice.token_ids?.length ?? 0);
        if (choice.finish_reason) one.end(choice.finish_reason, true);
      }
      scroll(false);
    }
  } catch (error) {
    fault = error.name === "AbortError" ? "stopped" : explain(error);
  }
  for (const one of answers) if (!one.complete) one.end(fault === "stopped" ? "stopped" : "not complete", false);
  if (fault && fault !== "stopped") {
    const shown = element("p", "fault", fault);
    shown.setAttribute("role", "alert");
    turn.after(shown);
  }
  scroll(false);
  const said = answers.filter((one) => one.complete || one.text);
  if (!said.length) {
    turn.remove();
    return false;
  }
  if (conversation === messages) goOnFrom(answers, said[0]);
  return true;
}

/** The picked answer is what the model will have said; with several the user may pick another one. */
function goOnFrom(answers, first) {
  const message = { role: "assistant", content: first.text };
  const conversation = messages;
  conversation.push(message);
  if (answers.length === 1) return;
  const group = `turn-${conversation.length}`;
  const pick = (picked) => {
    message.content = picked.text;
    for (const one of answers) one.element.classList.toggle("picked", one === picked);
  };
  answers.forEach((one, index) => {
    one.addPick(`${index + 1} of ${answers.length}, go on from here`, group, one === first, () => pick(one));
  });
  pick(first);
}

// ---------------------------------------------------------------- what the user sees

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  log.setAttribute("aria-busy", String(is));
}

function notify(words) {
  at("notice").textContent = words;
  at("notice").hidden = !words;
}

function explain(error) {
  if (error instanceof ApiError) return error.message;
  return error instanceof TypeError ? "The server cannot be reached." : error.message;
}

/** Keeps the end in sight, unless the user has scrolled up to read. */
function scroll(always) {
  const below = log.scrollHeight - log.scrollTop - log.clientHeight;
  if (always || below < 120) log.scrollTop = log.scrollHeight;
}

loadModels();
