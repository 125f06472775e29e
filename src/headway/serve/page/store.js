// Conversations in this browser (IndexedDB, because pictures are large), and what the person has chosen (localStorage).
import { checkedConversation, newId, titleOf } from "./conversation.js";

const DATABASE = "headway-chat", CHOICES = "headway-chat";

const done = (request) => new Promise((resolve, reject) => { request.onsuccess = () => resolve(request.result); request.onerror = () => reject(request.error); });

const openDatabase = () => {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => { for (const name of ["list", "conversations"]) request.result.createObjectStore(name, { keyPath: "id" }); };
  return done(request);
};

const summary = (one) => ({ id: one.id, title: titleOf(one), created: one.created, updated: one.updated });

export class Store {
  // Without IndexedDB (a private window of some browsers) conversations last as long as the page.
  static async open() {
    try { return new Store(await openDatabase()); } catch { return new Store(null); }
  }

  constructor(database) {
    this.database = database;
    this.memory = new Map();
    this.others = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel(DATABASE);
  }

  get isKept() { return this.database !== null; }

  // Another tab has written or removed a conversation.
  onOther(listener) { if (this.others) this.others.onmessage = (event) => listener(event.data); }

  async list() {
    const found = this.database ? await done(this.database.transaction("list").objectStore("list").getAll()) : [...this.memory.values()].map(summary);
    return found.sort((a, b) => b.updated - a.updated);
  }

  async read(id) {
    const found = this.database ? await done(this.database.transaction("conversations").objectStore("conversations").get(id)) : this.memory.get(id);
    return found ? { ...checkedConversation(found), id } : null;
  }

  async write(conversation) {
    const kept = JSON.parse(JSON.stringify(conversation));
    await this.change((list, whole) => { list.put(summary(kept)); whole.put(kept); }, () => this.memory.set(kept.id, kept));
    this.others?.postMessage({ id: kept.id });
  }

  async remove(id) {
    await this.change((list, whole) => { list.delete(id); whole.delete(id); }, () => this.memory.delete(id));
    this.others?.postMessage({ id, isRemoved: true });
  }

  change(act, otherwise) {
    if (!this.database) { otherwise(); return Promise.resolve(); }
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(["list", "conversations"], "readwrite");
      transaction.oncomplete = () => resolve();
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
      act(transaction.objectStore("list"), transaction.objectStore("conversations"));
    });
  }

  // A copy under a new id: what is imported never replaces what is there.
  async adopt(conversation) {
    const made = { ...conversation, id: newId() };
    await this.write(made);
    return made;
  }
}

export const readChoices = () => {
  try { const found = JSON.parse(localStorage.getItem(CHOICES) || "{}"); return found && typeof found === "object" ? found : {}; } catch { return {}; }
};

export const choose = (changes) => {
  try { localStorage.setItem(CHOICES, JSON.stringify({ ...readChoices(), ...changes })); } catch { /* storage may be off or full */ }
};
