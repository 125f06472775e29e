// The turns of a conversation on the page: questions, answers side by side, versions to step through.
import { arrange, button, copyButton, el, fill, icon, seconds, short } from "./dom.js";
import { pathOf, shownAnswer, step } from "./conversation.js";
import { makeRenderer } from "./markdown.js";
import { say } from "./words.js";

export class Thread {
  constructor(app) {
    this.app = app;
    this.list = el("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": say("conversation") });
    this.toEnd = button("down", say("toEnd"), () => this.stick(), { class: "toend" });
    this.node = el("div", { class: "thread", tabindex: -1 }, this.list);
    this.sticks = true;
    this.views = new WeakMap();
    this.articles = new WeakMap();
    this.waiting = new Set();
    this.editing = this.editorNode = null;
    this.node.addEventListener("scroll", () => {
      this.sticks = this.node.scrollTop + this.node.clientHeight >= this.node.scrollHeight - 48;
      this.toEnd.hidden = this.sticks;
    }, { passive: true });
    this.toEnd.hidden = true;
  }

  stick() { this.sticks = true; this.node.scrollTop = this.node.scrollHeight; }

  // Draw everything that is shown; answers keep their nodes.
  draw() {
    const { conversation } = this.app;
    const path = pathOf(conversation);
    arrange(this.list, path.length ? path.map((one) => this.turn(one.turn, one.fork)) : [this.hello()]);
    this.list.classList.toggle("two", path.some((one) => one.turn.answers.length > 1) || conversation.models.length > 1);
    if (this.sticks) this.stick();
  }

  hello() {
    const names = this.app.conversation.models.join(" · "), known = this.app.conversation.models.map((name) => this.app.model(name)).filter(Boolean);
    const facts = known.map((one) => [known.length > 1 ? one.name : null, one.context ? say("context", { n: one.context.toLocaleString() }) : null, one.masks ? say("masks") : null].filter(Boolean).join(" · "));
    const lacks = known.filter((one) => !one.hasTemplate).map((one) => el("p", { class: "warn" }, say("noTemplate", { model: one.name })));
    return el("div", { class: "hello" }, el("h2", {}, names ? say("hello", { model: names }) : say("noModels")), facts.filter(Boolean).map((one) => el("p", {}, one)), lacks, el("p", {}, say("helloHint")));
  }

  turn(turn, fork) {
    const lanes = turn.answers.map((_, lane) => lane).filter((lane) => turn.answers[lane].length);
    let article = this.articles.get(turn);
    if (!article) this.articles.set(turn, article = el("article", { class: "turn", "data-turn": turn.id }, el("div"), el("div", { class: "answers" })));
    article.firstChild.replaceWith(this.editing === turn ? (this.editorNode ??= this.editor(turn, fork)) : this.question(turn, fork));
    arrange(article.lastChild, lanes.map((lane) => this.answer(turn, lane)));
    return article;
  }

  question(turn, fork) {
    const tools = el("div", { class: "tools" }, this.stepper(fork, "shown", fork.turns.length),
      copyButton(say("copy"), say("copied"), () => turn.prompt.text),
      button("edit", say("edit"), () => this.edit(turn), { disabled: this.app.isBusy }));
    return el("section", { class: "question", "aria-label": say("you") }, mediaNodes(turn.prompt.media),
      turn.prompt.text ? el("div", { class: "bubble pre" }, turn.prompt.text) : null, tools);
  }

  // One question at a time is edited, or none (null). Its field keeps what was typed while other things are drawn again.
  edit(turn) {
    this.editing = turn;
    this.editorNode = null;
    if (turn) this.sticks = false;
    this.draw();
    this.editorNode?.querySelector("textarea").focus();
  }

  editor(turn, fork) {
    const box = el("textarea", { "aria-label": say("edit"), rows: Math.min(12, turn.prompt.text.split("\n").length + 1) });
    box.value = turn.prompt.text;
    const leave = () => this.edit(null);
    const send = () => {
      if (!box.value.trim() && !turn.prompt.media.length) return;
      this.editing = this.editorNode = null;
      this.app.edit(fork, { text: box.value, media: turn.prompt.media });
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
    });
    return el("section", { class: "question editor" }, mediaNodes(turn.prompt.media), box,
      el("div", { class: "row" }, el("button", { type: "button", class: "plain", onclick: leave }, say("cancel")), el("button", { type: "button", class: "primary", onclick: send }, say("save"))));
  }

  answer(turn, lane) {
    const answer = shownAnswer(turn, lane);
    let view = this.views.get(answer);
    if (!view) this.views.set(answer, view = new AnswerView(answer));
    const isLast = !this.app.isBusy;
    view.place({
      stepper: this.stepper(turn.shown, lane, turn.answers[lane].length),
      regenerate: isLast ? () => this.app.regenerate(turn, lane) : null,
      retry: isLast ? () => this.app.retry(turn, lane, answer) : null,
    });
    return view.node;
  }

  // ‹ 2 of 3 ›, where there is more than one.
  stepper(holder, key, count) {
    if (count < 2) return null;
    const move = (by) => () => { step(holder, key, by, count); this.sticks = false; this.app.changed(); this.draw(); };
    const at = holder[key] + 1;
    return el("span", { class: "stepper" },
      button("left", say("earlier"), move(-1), { disabled: this.app.isBusy || at === 1 }), el("span", {}, say("versions", { at, of: count })),
      button("right", say("later"), move(1), { disabled: this.app.isBusy || at === count }));
  }

  // An answer has grown: drawn once per frame.
  update(answer) {
    if (!this.waiting.size) requestAnimationFrame(() => this.flush());
    this.waiting.add(answer);
  }

  flush() {
    for (const answer of this.waiting) this.views.get(answer)?.update();
    this.waiting.clear();
    if (this.sticks) this.stick();
  }
}

const mediaNodes = (media) => (media.length ? el("div", { class: "media" }, media.map((one) => (one.kind === "image"
  ? el("img", { src: one.url, alt: one.name })
  : el("audio", { src: one.url, controls: true, "aria-label": one.name })))) : null);

export { mediaNodes };

class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.body = el("div", { class: "markdown" });
    this.render = makeRenderer(this.body);
    this.note = el("p", { class: "note" });
    this.foot = el("div", { class: "stats" });
    this.tools = el("div", { class: "tools" });
    this.problem = el("p", { class: "problem", role: "alert" });
    this.node = el("section", { class: "answer" }, el("h3", { class: "name" }, answer.model), this.note, this.body, this.problem, el("div", { class: "under" }, this.tools, this.foot));
    this.node.setAttribute("aria-label", answer.model);
  }

  place({ stepper, regenerate, retry }) {
    const { answer } = this;
    fill(this.tools, stepper, answer.text ? copyButton(say("copy"), say("copied"), () => answer.text) : null,
      button("retry", say("regenerate"), regenerate ?? (() => {}), { disabled: !regenerate }));
    this.retry = retry;
    this.update();
  }

  update() {
    const { answer } = this;
    this.node.dataset.state = answer.state;
    this.node.querySelector(".name").textContent = answer.model;
    this.render(answer.text);
    this.note.textContent = answer.leftOut > 1 ? say("leftOut", { n: answer.leftOut }) : answer.leftOut === 1 ? say("leftOutOne") : "";
    const isEmpty = answer.state === "done" && !answer.text;
    const line = answer.state === "error" ? answer.error : isEmpty ? say("empty") : "";
    fill(this.problem, line, line && this.retry ? el("button", { type: "button", class: "plain", onclick: this.retry }, icon("retry"), say("retry")) : null);
    this.problem.hidden = !line;
    this.foot.textContent = this.facts().join(" · ");
  }

  facts() {
    const { stats, state, finish } = this.answer, found = [];
    if (stats.tokens) found.push(say("tokens", { n: stats.tokens.toLocaleString() }));
    if (stats.rate) found.push(say("rate", { n: short(stats.rate) }));
    if (stats.first !== undefined) found.push(say("first", { n: seconds(stats.first) }));
    if (stats.cached) found.push(say("cached", { n: stats.cached.toLocaleString() }));
    if (state === "stopped") found.push(say("stopped"));
    if (state === "done" && finish === "length") found.push(say("cutLength"));
    if (state === "done" && finish === "context") found.push(say("cutContext"));
    return found;
  }
}
