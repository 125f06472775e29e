// The page: header, list of conversations, turns, composer and settings, held together by what is open now.
import { readInfo, readLive, signIn } from "./api.js";
import { Composer, SignIn } from "./composer.js";
import { addTurn, editTurn, newConversation, titleOf } from "./conversation.js";
import { button, bytes, el, fill, short } from "./dom.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { choose, readChoices, Store } from "./store.js";
import { Thread } from "./thread.js";
import { language, say } from "./words.js";

const LIVE_BUSY = 1000, LIVE_IDLE = 5000;

class App {
  constructor(store) {
    this.store = store;
    this.choices = readChoices();
    this.models = [];
    this.loaded = new Map();
    this.conversation = newConversation([]);
    this.session = new Session(store, (...news) => this.hear(...news));
    this.sidebar = new Sidebar(this);
    this.thread = new Thread(this);
    this.composer = new Composer(this);
    this.settings = new Settings(this, () => this.toggle("tuning", false));
    this.signIn = new SignIn((token) => { signIn(token); this.connect(); });
    this.build();
    store.onOther((news) => this.hearOther(news));
  }

  build() {
    this.first = el("select", { "aria-label": say("model"), onchange: () => this.pick(0, this.first.value) });
    this.second = el("select", { "aria-label": say("second"), onchange: () => this.pick(1, this.second.value) });
    this.compare = button("compare", say("compare"), () => this.setCompare(this.conversation.models.length < 2));
    this.live = el("output", { class: "live" });
    this.status = el("div", { class: "offscreen", role: "status", "aria-live": "polite" });
    this.problem = el("p", { class: "problem banner", role: "alert", hidden: true });
    this.tuning = button("settings", say("settings"), () => this.toggle("tuning"), { "aria-expanded": "false" });
    const menu = button("menu", say("menu"), () => this.toggle("drawer"), { class: "menu" });
    const header = el("header", {}, menu, el("h1", {}, say("title")), el("div", { class: "models" }, this.first, this.second, this.compare), el("div", { class: "spring" }),
      this.live, this.tuning, button("theme", say("theme"), () => this.theme(true)));
    const main = el("main", {}, this.problem, this.signIn.node, this.thread.node, this.thread.toEnd, this.composer.node);
    const shade = el("div", { class: "shade", onclick: () => { this.toggle("drawer", false); this.toggle("tuning", false); } });
    fill(document.getElementById("app"), header, el("div", { class: "body" }, this.sidebar.node, main, this.settings.node, shade), this.status);
    document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
    this.theme(false);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.theme(false));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.escape(); });
    addEventListener("pagehide", () => this.session.leaveNote());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
  }

  get isBusy() { return this.session.isRunning(this.conversation); }

  model(name) { return this.models.find((one) => one.name === name); }

  // ---- the server
  async connect() {
    try {
      const info = await readInfo();
      this.models = info.models;
      this.signIn.leave();
      this.fail(info.models.length ? "" : say("noModels"));
    } catch (problem) {
      if (problem.status === 401) this.signIn.ask(problem.message);
      else this.fail(problem.message, () => this.connect());
      return;
    }
    if (!this.conversation.models.length) this.conversation.models = this.usualModels();
    this.show();
    this.poll();
  }

  usualModels() {
    const known = (this.choices.models ?? []).filter((name) => this.model(name));
    return known.length ? known.slice(0, 2) : this.models.slice(0, 1).map((one) => one.name);
  }

  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      const now = await readLive(), used = bytes(now.cache_bytes);
      const parts = [
        now.tokens_per_second ? say("rate", { n: short(now.tokens_per_second) }) : null, now.running ? say("running", { n: now.running }) : null, now.waiting ? say("waiting", { n: now.waiting }) : null,
        now.cache_budget_bytes ? say("cacheOf", { used, budget: bytes(now.cache_budget_bytes) }) : say("cache", { used }),
      ];
      this.live.textContent = parts.filter(Boolean).join(" · ");
    } catch { this.live.textContent = ""; }
    this.timer = setTimeout(() => this.poll(), this.session.running.size ? LIVE_BUSY : LIVE_IDLE);
  }

  // ---- conversations
  start() {
    this.conversation = newConversation(this.usualModels());
    choose({ open: null });
    this.toggle("drawer", false);
    this.show();
    this.composer.box.focus();
  }

  async load(id) {
    if (this.conversation.id === id) return this.conversation;
    const known = this.loaded.get(id) ?? await this.store.read(id);
    if (known) this.loaded.set(id, known);
    return known;
  }

  async open(id) {
    const found = await this.load(id);
    if (!found) { await this.sidebar.refresh(); return; }
    if (!found.models.length) found.models = this.usualModels();
    this.conversation = found;
    this.thread.editing = this.thread.editorNode = null;
    this.thread.sticks = true;
    choose({ open: id });
    this.toggle("drawer", false);
    this.show();
  }

  async rename(id, title) {
    const found = await this.load(id);
    if (!found) return;
    found.title = title;
    await this.store.write(found);
  }

  async remove(id) {
    const found = this.loaded.get(id) ?? (this.conversation.id === id ? this.conversation : null);
    if (found) this.session.forget(found);
    this.loaded.delete(id);
    await this.store.remove(id);
    if (this.conversation.id === id) this.start();
    await this.sidebar.refresh();
  }

  // Something about the open conversation has changed: keep it, once it has a turn.
  changed() {
    if (this.conversation.root.turns.length) this.session.save(this.conversation, true);
  }

  send(prompt) { this.thread.sticks = true; this.ask(addTurn(this.conversation, prompt)); }

  edit(fork, prompt) { this.thread.sticks = true; this.ask(editTurn(this.conversation, fork, prompt)); }

  ask(turn) {
    this.loaded.set(this.conversation.id, this.conversation);
    choose({ open: this.conversation.id, models: this.conversation.models });
    this.session.answer(this.conversation, turn);
  }

  regenerate(turn, lane) { this.session.answer(this.conversation, turn, [lane]); }

  retry(turn, lane, answer) { this.session.retry(this.conversation, turn, lane, answer); }

  stop() { this.session.stop(this.conversation); }

  // ---- models
  pick(lane, name) {
    this.conversation.models[lane] = name;
    choose({ models: this.conversation.models });
    this.changed();
    this.show();
  }

  setCompare(isOn) {
    const [first] = this.conversation.models, other = this.models.find((one) => one.name !== first)?.name ?? first;
    if (first) this.conversation.models = isOn ? [first, other] : [first];
    choose({ models: this.conversation.models });
    this.changed();
    this.show();
  }

  // ---- drawing
  show() {
    this.thread.draw();
    this.settings.draw();
    this.sidebar.refresh();
    this.composer.fit();
    this.controls();
  }

  controls() {
    const { models } = this.conversation, names = this.models.map((one) => one.name);
    for (const [node, lane] of [[this.first, 0], [this.second, 1]]) {
      const chosen = models[lane], offered = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
      fill(node, offered.map((name) => el("option", { value: name }, name)));
      if (chosen) node.value = chosen;
      node.hidden = lane === 1 && models.length < 2;
      node.disabled = this.isBusy;
    }
    const lost = this.models.length ? models.find((name) => !names.includes(name)) : null;
    if (lost) this.composer.fail(say("gone", { model: lost }));
    this.compare.setAttribute("aria-pressed", String(models.length > 1));
    this.compare.disabled = this.isBusy;
    this.compare.hidden = !this.models.length;
    document.title = `${this.isBusy ? "● " : ""}${titleOf(this.conversation) || say("title")}`;
    this.composer.update();
  }

  hear(kind, conversation, answer) {
    if (kind === "unsaved") { this.fail(say("noStore")); return; }
    if (kind === "denied") this.signIn.ask(answer.error);
    if (conversation !== this.conversation) return;
    if (kind === "text") { this.thread.update(answer); return; }
    this.thread.draw();
    this.controls();
    this.status.textContent = answer.state === "running" ? say("answering", { model: answer.model }) : answer.state === "error" ? answer.error : say("answered", { model: answer.model });
    this.sidebar.refresh();
    if (answer.state === "running") this.poll();
  }

  // Another tab has changed a conversation: what is open and idle here is read again.
  async hearOther({ id, isRemoved }) {
    const known = this.loaded.get(id);
    if (known && this.session.isRunning(known)) return;
    this.loaded.delete(id);
    if (this.conversation.id === id && !isRemoved && !this.thread.editing) {
      const found = await this.store.read(id);
      if (found) { this.conversation = found; this.loaded.set(id, found); this.show(); }
    }
    await this.sidebar.refresh();
  }

  escape() {
    if (this.isBusy) this.stop();
    else { this.toggle("drawer", false); if (innerWidth <= 820) this.toggle("tuning", false); }
  }

  toggle(name, isOn = !document.body.classList.contains(name)) {
    document.body.classList.toggle(name, isOn);
    if (name === "tuning") { this.tuning.setAttribute("aria-expanded", String(isOn)); choose({ tuning: isOn }); }
  }

  theme(turn) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    let chosen = this.choices.theme || (dark ? "dark" : "light");
    if (turn) { chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; this.choices.theme = chosen; choose({ theme: chosen }); }
    document.documentElement.dataset.theme = chosen;
  }

  fail(line, retry = null) {
    fill(this.problem, line, line && retry ? el("button", { type: "button", class: "plain", onclick: retry }, say("retry")) : null);
    this.problem.hidden = !line;
  }
}

const takeToken = () => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  signIn(given);
  history.replaceState(null, "", location.pathname + location.search); // the token must not stay in the address
};

const begin = async () => {
  takeToken();
  const app = new App(await Store.open());
  globalThis.headwayChat = app;
  if (!app.store.isKept) app.sidebar.line.textContent = say("noStore");
  await app.session.recover();
  if (app.choices.open) await app.open(app.choices.open);
  if (app.choices.tuning && innerWidth > 1100) app.toggle("tuning", true);
  app.show();
  await app.connect();
  if (innerWidth > 820) app.composer.box.focus();
};

begin();
