// One answer on the page: its text as it comes, and its figures. Text goes in as text nodes only, never as HTML.

/** A rate over less time than this says nothing. */
const SHORTEST_S = 0.02;

export class Answer {
  #words;
  #figures;
  #text = "";
  #tokens = 0;
  #firstTokens = 0;
  #first = null;
  #last = null;
  #sent;
  #planned = false;
  #complete = false;
  #how = "";

  /** @param sent when the request was sent, in milliseconds of performance.now() */
  constructor(sent) {
    this.#sent = sent;
    this.element = element("article", "answer open");
    this.#words = element("div", "words");
    this.#words.append(element("div", ""));
    this.#figures = element("p", "figures");
    this.element.append(this.#words, this.#figures);
  }

  get text() {
    return this.#text;
  }

  get complete() {
    return this.#complete;
  }

  /** Lets the user choose it as the one to go on from. */
  addPick(label, group, picked, onPick) {
    const pick = element("label", "pick");
    const radio = element("input", "");
    radio.type = "radio";
    radio.name = group;
    radio.checked = picked;
    radio.addEventListener("change", onPick);
    pick.append(radio, label);
    this.element.prepend(pick);
  }

  take(text, tokens) {
    const now = performance.now();
    if (tokens && this.#first === null) {
      this.#first = now;
      this.#firstTokens = tokens;
    }
    if (tokens) this.#last = now;
    this.#tokens += tokens;
    this.#text += text;
    if (!this.#planned) {
      this.#planned = true;
      requestAnimationFrame(() => this.#draw());
    }
  }

  /**
   * @param how the finish reason, or why it ended early
   * @param complete whether the model ended it
   */
  end(how, complete) {
    this.#complete = complete;
    this.#how = how;
    this.element.classList.remove("open");
    this.#draw();
  }

  #draw() {
    this.#planned = false;
    this.#words.replaceChildren(...blocks(this.#text));
    const parts = [...this.#parts(), this.#how].filter(Boolean);
    this.#figures.textContent = parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
  }

  #parts() {
    if (this.#first === null) return [];
    const seconds = (this.#last - this.#first) / 1000;
    const later = this.#tokens - this.#firstTokens;
    return [
      `${this.#tokens} ${this.#tokens === 1 ? "token" : "tokens"}`,
      later > 0 && seconds >= SHORTEST_S ? `${(later / seconds).toFixed(1)} tokens/s` : "",
      `first after ${((this.#first - this.#sent) / 1000).toFixed(2)} s`,
    ];
  }
}

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Paragraphs and fenced code, which is all of Markdown that is shown as such. */
function blocks(text) {
  const made = [];
  text.split(/^```.*$\n?/m).forEach((part, index) => {
    if (index % 2) made.push(element("pre", "", part.replace(/\n$/, "")));
    else if (part.trim() || !made.length) made.push(element("div", "", part.replace(/\n$/, "")));
  });
  return made;
}
