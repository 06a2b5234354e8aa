// The chat page: one conversation, streamed from /v1/chat/completions.

const element = (id) => document.getElementById(id);
const chat = element("chat");
const promptField = element("prompt");

const messages = [];
let running = null; // the AbortController of the answer under way

const headers = () => {
  const key = element("key").value.trim();
  const all = { "Content-Type": "application/json" };
  return key ? { ...all, Authorization: `Bearer ${key}` } : all;
};

function showError(text) {
  element("error").textContent = text;
  element("error").hidden = !text;
}

// --- the model ------------------------------------------------------------------------------

let model = null;

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    element("settings").open = true;
    throw new Error("The server needs an API key: give it in the settings.");
  }
  if (!response.ok) throw new Error(await problemOf(response));
  [model] = (await response.json()).data;
  element("model").textContent = model.id;
  const most = model.num_speculative_tokens;
  element("proposals").max = most;
  element("proposals").disabled = most === 0;
  element("proposals").placeholder = most ? `${most}, as compiled` : "there is no draft";
  element("max-tokens").max = model.max_model_len;
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// --- requests -------------------------------------------------------------------------------

function body() {
  const wanted = {
    model: model.id,
    messages,
    max_tokens: element("max-tokens").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true, include_rounds: true },
  };
  const temperature = element("temperature").valueAsNumber;
  if (!Number.isNaN(temperature)) wanted.temperature = temperature;
  const proposals = element("proposals").valueAsNumber;
  if (proposals === 0) wanted.disable_spec_decode = true;
  else if (!Number.isNaN(proposals)) wanted.num_speculative_tokens = proposals;
  return wanted;
}

/** The data of server-sent events, as they come. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice("data: ".length);
    }
  }
}

async function answer(into, signal) {
  const counts = new Counts();
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body()),
    signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return counts.show("");
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (!choice) continue;
    if (choice.edgecc) counts.add(choice.edgecc);
    if (choice.delta.content) append(into, choice.delta.content, choice.edgecc);
    counts.show(choice.finish_reason === "length" ? "; cut at the limit of tokens" : "");
  }
  throw new Error("The answer has ended early.");
}

/** Counts of one answer, and the line that shows them. */
class Counts {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.tokens = this.drafts = this.accepted = 0;
    this.note = "";
  }

  add(round) {
    this.first ??= performance.now();
    this.last = performance.now();
    this.tokens += round.completion_tokens;
    this.drafts += round.drafts;
    this.accepted += round.accepted_tokens;
  }

  show(note) {
    this.note ||= note;
    if (this.first === null) return;
    const parts = [`${this.tokens} tokens`];
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens > 1 && seconds > 0) {
      parts.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.drafts) {
      parts.push(`${(this.accepted / this.drafts).toFixed(2)} proposals accepted per step`);
    }
    parts.push(`first token after ${Math.round(this.first - this.begun)} ms`);
    element("stats").textContent = parts.join(", ") + this.note;
  }
}

// --- the conversation -----------------------------------------------------------------------

function addMessage(role, text) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const heading = document.createElement("h2");
  heading.textContent = role === "user" ? "You" : "Model";
  const content = document.createElement("div");
  content.className = "text";
  content.textContent = text;
  message.append(heading, content);
  chat.append(message);
  chat.scrollTop = chat.scrollHeight;
  return content;
}

/** Add the text of one event: a run of tokens that were committed together. */
function append(into, text, round) {
  const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
  const run = document.createElement("span");
  run.className = "run";
  run.textContent = text;
  if (round) {
    run.dataset.accepted = Math.min(3, round.accepted_tokens);
    run.title = round.draft_tokens
      ? `${round.accepted_tokens} of ${round.draft_tokens} proposals accepted`
      : "no proposals";
  }
  into.append(run);
  if (atEnd) chat.scrollTop = chat.scrollHeight;
}

function busy(on) {
  element("send").disabled = on;
  element("stop").disabled = !on;
}

async function send() {
  const text = promptField.value;
  if (running || !text.trim() || !element("form").reportValidity()) return;
  const invalid = element("settings").querySelector("input:invalid");
  if (invalid) {
    element("settings").open = true;
    invalid.reportValidity();
    return;
  }
  showError("");
  running = new AbortController();
  const { signal } = running;
  busy(true);
  let into = null;
  let whole = false;
  try {
    if (!model) await findModel();
    signal.throwIfAborted();
    messages.push({ role: "user", content: text });
    addMessage("user", text);
    promptField.value = "";
    into = addMessage("assistant", "");
    into.parentElement.setAttribute("aria-busy", "true"); // read out when it is complete
    await answer(into, signal);
    whole = true;
  } catch (error) {
    if (signal.aborted) element("stats").textContent += "; stopped";
    else showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  } finally {
    if (into) settle(into, text, whole);
    if (running?.signal === signal) {
      running = null;
      busy(false);
      promptField.focus();
    }
  }
}

/** Keep an answer, whole or cut; if none has begun, give the message back to change it. */
function settle(into, text, whole) {
  into.parentElement.removeAttribute("aria-busy");
  if (!chat.contains(into)) return; // a new chat has begun
  if (whole || into.textContent) {
    messages.push({ role: "assistant", content: into.textContent });
    return;
  }
  messages.pop();
  into.parentElement.previousElementSibling.remove();
  into.parentElement.remove();
  promptField.value ||= text;
}

function newChat() {
  running?.abort();
  running = null;
  busy(false);
  messages.length = 0;
  chat.replaceChildren();
  element("stats").textContent = "";
  showError("");
  promptField.focus();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
promptField.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
element("stop").addEventListener("click", () => running?.abort());
element("new").addEventListener("click", newChat);
element("key").addEventListener("change", () => {
  model = null;
  findModel().then(() => showError(""), (error) => showError(error.message));
});

findModel().catch((error) => showError(error.message));
