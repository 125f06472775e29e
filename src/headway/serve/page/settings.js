// The system prompt and the sampling of a conversation.
import { button, el } from "./dom.js";
import { DEFAULTS, RANGES } from "./conversation.js";
import { say } from "./words.js";

const NAMES = { temperature: "temperature", top_p: "topP", top_k: "topK", max_tokens: "maxTokens", seed: "seed" };

export class Settings {
  constructor(app, onClose) {
    this.app = app;
    this.system = el("textarea", { id: "system", rows: 5, placeholder: say("systemHint"), oninput: () => { app.conversation.system = this.system.value; app.changed(); } });
    this.fields = Object.fromEntries(Object.keys(NAMES).map((key) => [key, this.field(key)]));
    this.node = el("aside", { class: "settings", "aria-label": say("settings") },
      el("div", { class: "sidehead row" }, el("h2", {}, say("settings")), button("close", say("close"), onClose)),
      el("div", { class: "form" }, el("label", { for: "system" }, say("system")), this.system,
        Object.entries(this.fields).map(([key, field]) => el("label", { class: "line" }, el("span", {}, say(NAMES[key])), field)),
        el("button", { type: "button", class: "plain", onclick: () => { app.conversation.sampling = { ...DEFAULTS }; app.changed(); this.draw(); } }, say("reset"))));
  }

  field(key) {
    const range = RANGES[key], node = el("input", { type: "number", name: key, inputmode: "decimal", min: range.min, max: range.max, step: range.step, placeholder: say("usual") });
    node.addEventListener("change", () => {
      const value = node.value.trim() === "" ? null : Number(node.value);
      const isGood = value === null || (Number.isFinite(value) && value >= range.min && value <= range.max && (range.step !== 1 || Number.isInteger(value)));
      node.setAttribute("aria-invalid", String(!isGood));
      if (!isGood) return;
      this.app.conversation.sampling[key] = value;
      this.app.changed();
    });
    return node;
  }

  draw() {
    const { system, sampling } = this.app.conversation;
    this.system.value = system;
    for (const [key, field] of Object.entries(this.fields)) { field.value = sampling[key] ?? ""; field.setAttribute("aria-invalid", "false"); }
  }
}
