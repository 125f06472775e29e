// The list of conversations: open, rename, delete, export, import.
import { button, el, fill, icon } from "./dom.js";
import { checkedConversation, plainMessages, readFile, titleOf } from "./conversation.js";
import { say } from "./words.js";

const SURE_FOR = 3000;

export class Sidebar {
  constructor(app) {
    this.app = app;
    this.found = [];
    this.renaming = null;
    this.list = el("ul", { class: "chats" });
    this.search = el("input", { type: "search", placeholder: say("search"), "aria-label": say("search"), oninput: () => this.draw() });
    this.file = el("input", { type: "file", accept: "application/json,.json", hidden: true, multiple: true, "aria-label": say("importFile"), onchange: () => this.take([...this.file.files]) });
    this.line = el("p", { class: "note", role: "status" });
    this.node = el("nav", { class: "sidebar", "aria-label": say("chats") },
      el("div", { class: "sidehead" }, el("button", { type: "button", class: "primary new", onclick: () => app.start() }, icon("plus"), say("newChat")), this.search),
      this.list, this.line,
      el("div", { class: "sidefoot" }, this.file,
        el("button", { type: "button", class: "plain", onclick: () => this.file.click() }, icon("upload"), say("importFile")),
        el("button", { type: "button", class: "plain", onclick: () => this.exportAll() }, icon("download"), say("exportAll"))));
  }

  async refresh() { this.found = await this.app.store.list(); this.draw(); }

  draw() {
    if (this.renaming) return;
    const words = this.search.value.trim().toLowerCase();
    fill(this.list, this.found.filter((one) => !words || one.title.toLowerCase().includes(words)).map((one) => this.entry(one)));
  }

  entry(one) {
    const isOpen = one.id === this.app.conversation.id, name = one.title || say("untitled");
    const remove = button("trash", say("remove"), () => this.remove(one.id, remove));
    return el("li", { class: isOpen ? "open" : null, "data-id": one.id },
      el("button", { type: "button", class: "chat", "aria-current": isOpen ? "page" : null, title: name, onclick: () => this.app.open(one.id) }, name),
      el("span", { class: "tools" }, button("edit", say("rename"), (event) => this.rename(one, event.currentTarget.closest("li"))), button("download", say("exportOne"), () => this.exportOne(one.id)), remove));
  }

  rename(one, row) {
    const field = el("input", { class: "renaming", "aria-label": say("rename"), maxlength: 200 });
    this.renaming = one.id;
    let isDone = false;
    const end = async (isKept) => {
      if (isDone) return;
      isDone = true;
      this.renaming = null;
      if (isKept) await this.app.rename(one.id, field.value.trim());
      await this.refresh();
    };
    field.value = one.title;
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    fill(row, field);
    field.select();
    field.focus();
  }

  // A second click within three seconds deletes.
  remove(id, node) {
    if (node.dataset.sure) { this.app.remove(id); return; }
    node.dataset.sure = "1";
    node.append(say("sureRemove"));
    setTimeout(() => { delete node.dataset.sure; node.lastChild?.nodeType === Node.TEXT_NODE && node.lastChild.remove(); }, SURE_FOR);
  }

  async exportOne(id) {
    const one = await this.app.load(id);
    if (!one) return;
    save({ headway_chat: 1, messages: plainMessages(one), conversation: checkedConversation(one) }, titleOf(one) || "chat");
  }

  async exportAll() {
    const all = await Promise.all(this.found.map((one) => this.app.load(one.id)));
    save({ headway_chat: 1, conversations: all.filter(Boolean).map(checkedConversation) }, "conversations");
  }

  async take(files) {
    this.file.value = "";
    let count = 0, last = null;
    this.line.textContent = "";
    for (const file of files) {
      let found = [];
      try { found = readFile(JSON.parse(await file.text()), this.app.conversation.models); } catch { /* not JSON: said below */ }
      if (!found.length) this.line.textContent = say("notJson", { name: file.name });
      for (const one of found) { last = await this.app.store.adopt(one); count++; }
    }
    if (count) this.line.textContent = `${this.line.textContent} ${say("imported", { n: count })}`.trim();
    await this.refresh();
    if (last) this.app.open(last.id);
  }
}

const save = (value, name) => {
  const address = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  const link = el("a", { href: address, download: `${name.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 60)}.json` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
};
