// Where a question is written: text, pictures and sounds; send and stop.
import { button, bytes, el, fill, icon } from "./dom.js";
import { isMedia } from "./conversation.js";
import { mediaNodes } from "./thread.js";
import { say } from "./words.js";

const MOST_BYTES = 20 * 2 ** 20;

export class Composer {
  constructor(app) {
    this.app = app;
    this.media = [];
    this.box = el("textarea", { id: "message", rows: 1, placeholder: say("writeHere"), "aria-label": say("message"), oninput: () => this.fit() });
    this.file = el("input", { type: "file", multiple: true, hidden: true, "aria-label": say("attach"), onchange: () => { this.attach([...this.file.files]); this.file.value = ""; } });
    this.attachButton = button("attach", say("attach"), () => this.file.click());
    this.sendButton = button("send", say("send"), () => this.send(), { class: "send" });
    this.stopButton = button("stop", say("stop"), () => app.stop(), { class: "send stop" });
    this.chosen = el("div", { class: "media chosen" });
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.node = el("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.send(); } },
      this.problem, el("div", { class: "writing" }, this.chosen, el("div", { class: "row" }, this.file, this.attachButton, this.box, this.sendButton, this.stopButton)));
    this.listen();
  }

  listen() {
    this.box.addEventListener("keydown", (event) => {
      // An input method ends a word with Enter too.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    this.box.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length && this.accepts) { event.preventDefault(); this.attach(files); }
    });
    this.node.addEventListener("dragover", (event) => { if (this.accepts) event.preventDefault(); });
    this.node.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  // What all chosen models take, as the file field understands it.
  get accepts() {
    const models = this.app.conversation.models.map((name) => this.app.model(name));
    return ["images", "audio"].filter((kind) => models.length && models.every((one) => one?.[kind])).map((kind) => (kind === "images" ? "image/*" : "audio/*")).join(",");
  }

  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight + 2, Math.max(120, innerHeight * 0.4))}px`;
    this.update();
  }

  update() {
    const isBusy = this.app.isBusy, { accepts } = this;
    this.sendButton.hidden = isBusy;
    this.stopButton.hidden = !isBusy;
    this.sendButton.disabled = !this.app.conversation.models.length || (!this.box.value.trim() && !this.media.length);
    this.attachButton.hidden = !accepts;
    this.file.accept = accepts;
    const label = say(accepts === "image/*" ? "attachImage" : accepts === "audio/*" ? "attachAudio" : "attach");
    this.attachButton.title = label;
    this.attachButton.setAttribute("aria-label", label);
  }

  async attach(files) {
    this.fail("");
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (!this.accepts.includes(`${kind}/*`)) { this.fail(say("notTaken", { model: this.app.conversation.models.join(", "), name: file.name })); continue; }
      if (file.size > MOST_BYTES) { this.fail(say("tooLarge", { name: file.name, size: bytes(file.size), most: bytes(MOST_BYTES) })); continue; }
      const one = { kind, name: file.name.slice(0, 200), url: await dataUri(file) };
      if (isMedia(one)) this.media.push(one);
    }
    this.drawMedia();
  }

  drawMedia() {
    fill(this.chosen, this.media.map((one, at) => el("div", { class: "chosenone" }, mediaNodes([one]),
      button("close", say("detach", { name: one.name }), () => { this.media.splice(at, 1); this.drawMedia(); }))));
    this.update();
  }

  send() {
    const text = this.box.value;
    if (this.app.isBusy || this.sendButton.disabled || (!text.trim() && !this.media.length)) return;
    if (this.media.some((one) => !this.accepts.includes(one.kind))) { this.fail(say("notTaken", { model: this.app.conversation.models.join(", "), name: this.media[0].name })); return; }
    this.app.send({ text, media: this.media });
    this.box.value = "";
    this.media = [];
    this.fail("");
    this.drawMedia();
    this.fit();
  }

  fail(line) { this.problem.textContent = line; this.problem.hidden = !line; }
}

const dataUri = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  // Some systems add parameters to the type, e.g. audio/webm;codecs=opus.
  reader.onload = () => resolve(String(reader.result).replace(/^data:([\w.+/-]+);.*?base64,/, "data:$1;base64,"));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

// Asks for the server's token.
export class SignIn {
  constructor(onToken) {
    this.field = el("input", { type: "password", id: "token", autocomplete: "off", "aria-label": say("token"), placeholder: say("token") });
    this.line = el("p", { role: "alert" });
    this.node = el("form", { class: "signin", hidden: true, onsubmit: (event) => { event.preventDefault(); if (this.field.value.trim()) onToken(this.field.value); } },
      this.line, el("div", { class: "row" }, this.field, el("button", { class: "primary" }, icon("done"), say("signIn"))));
  }

  ask(line) { this.line.textContent = line; this.node.hidden = false; this.field.value = ""; this.field.focus(); }

  leave() { this.node.hidden = true; }
}
