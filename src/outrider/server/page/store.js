// Conversations, stored in this browser only.
//
// One entry for a conversation's head, one for each of its messages: two windows never write the same entry unless
// they change the same message. A message names its parent, so retries and edits are branches of one tree; the head
// names the leaf that was shown last.
//
// head: { id, title, system, updated, leaf, from }; `from` is the first message that is still sent (earlier ones no
// longer fit the context). message: { id, parent, role, content, ... }

const PREFIX = "outrider.chat.",
  LIST = /^outrider\.chat\.([^/]+)$/;
let last = 0;
export function newId() {
  // by time: a message's id is greater than its parent's
  last = Math.max(Date.now(), last + 1);
  return `${last.toString(36).padStart(9, "0")}${Math.random().toString(36).slice(2, 8).padEnd(6, "0")}`;
}
const read = (key) => {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
};
const headKey = (id) => PREFIX + id,
  messageKey = (id, message) => `${PREFIX}${id}/${message}`;

// An id of this window that survives reloads.
export const WINDOW = sessionStorage.getItem("outrider.window") ?? newId();
sessionStorage.setItem("outrider.window", WINDOW);

export class Conversation {
  constructor(head) {
    Object.assign(this, { id: newId(), title: "", system: "", updated: 0, leaf: null, from: null }, head);
    this.messages = new Map();
  }

  // ---- the tree
  get(id) {
    return this.messages.get(id) ?? null;
  }
  get path() {
    return this.pathTo(this.leaf);
  }
  pathTo(leaf) {
    const out = [];
    for (let m = this.get(leaf); m && out.length < this.messages.size; m = this.get(m.parent)) out.unshift(m);
    return out;
  }
  children(parent) {
    return [...this.messages.values()].filter((m) => m.parent === parent).sort((a, b) => (a.id < b.id ? -1 : 1));
  }
  siblings(message) {
    return this.children(message.parent);
  }
  newest(id) {
    // the end of the branch, by newest children
    for (let next = this.children(id).at(-1); next; next = this.children(id).at(-1)) id = next.id;
    return id;
  }
  add(message, parent = this.leaf) {
    const made = { ...message, id: newId(), parent };
    this.messages.set(made.id, made);
    this.leaf = made.id;
    return made;
  }
  remove(message) {
    // its children move to its parent
    for (const child of this.children(message.id)) {
      child.parent = message.parent;
      this.keep(child);
    }
    if (this.leaf === message.id) this.leaf = message.parent;
    if (this.from === message.id) this.from = this.children(message.parent).at(-1)?.id ?? null;
    this.messages.delete(message.id);
    localStorage.removeItem(messageKey(this.id, message.id));
  }

  // ---- storing. False: storage is full.
  keep(message) {
    return write(messageKey(this.id, message.id), message, this.id) && this.keepHead();
  }
  keepHead() {
    this.updated = Date.now();
    const first = [...this.messages.values()].find((m) => m.role === "user");
    this.title ||= first?.content.trim().slice(0, 60) || (first?.media ? "Attachment" : "");
    const { id, title, system, updated, leaf, from } = this;
    return write(headKey(id), { id, title, system, updated, leaf, from }, id);
  }
  // Merges another window's messages and removals; `own`, which is being written here, stays.
  refresh(own = null) {
    const head = read(headKey(this.id));
    if (!head) return false;
    const mine = own && this.get(own);
    this.title = head.title;
    this.messages = messagesOf(this.id);
    if (mine) this.messages.set(own, mine);
    if (!this.get(this.leaf)) this.leaf = this.get(head.leaf) ? head.leaf : this.newest(null);
    if (!own) this.leaf = this.newest(this.leaf); // show messages that were added after the shown one
    return true;
  }
}

// Earlier versions stored images only, under that name.
function withMedia({ images, ...message }) {
  return images && !message.media ? { ...message, media: images } : message;
}

function messagesOf(id) {
  const found = Object.keys(localStorage)
    .filter((k) => k.startsWith(`${PREFIX}${id}/`))
    .map(read)
    .filter((m) => m?.id && typeof m.content === "string")
    .map(withMedia);
  return new Map(found.sort((a, b) => (a.id < b.id ? -1 : 1)).map((m) => [m.id, m]));
}

// When the browser's storage is full, the oldest conversations are deleted.
function write(key, value, keep) {
  for (;;) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      const oldest = heads()
        .filter((c) => c.id !== keep)
        .at(-1);
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export function heads() {
  const found = Object.keys(localStorage)
    .map((k) => LIST.exec(k)?.[1])
    .filter(Boolean)
    .map((id) => read(headKey(id)));
  return found.filter((h) => h?.id).sort((a, b) => b.updated - a.updated);
}

export function load(id) {
  const head = read(headKey(id));
  if (!head) return null;
  if (Array.isArray(head.messages)) return adopt(head);
  const conversation = new Conversation(head);
  conversation.messages = messagesOf(id);
  if (!conversation.get(conversation.leaf)) conversation.leaf = conversation.newest(null);
  return conversation;
}

// A conversation as one list, as earlier versions stored it.
function adopt({ messages, from, ...head }) {
  const conversation = new Conversation({ ...head, leaf: null, from: null });
  const made = messages
    .filter((m) => typeof m?.content === "string")
    .map((m) => conversation.add({ ...m, done: true }));
  conversation.from = made[from || -1]?.id ?? null;
  const { updated } = conversation;
  for (const message of made) write(messageKey(conversation.id, message.id), message, conversation.id);
  conversation.keepHead();
  write(headKey(conversation.id), { ...read(headKey(conversation.id)), updated }, conversation.id);
  return conversation;
}

export function rename(id, title) {
  const head = load(id) && read(headKey(id));
  if (head) write(headKey(id), { ...head, title }, id);
}

export function remove(id) {
  for (const key of Object.keys(localStorage))
    if (key === headKey(id) || key.startsWith(`${PREFIX}${id}/`)) localStorage.removeItem(key);
}

// Conversations with all the words in their title or in one message.
export function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean),
    texts = new Map();
  for (const key of Object.keys(localStorage)) {
    const [id, message] = key.startsWith(PREFIX) ? key.slice(PREFIX.length).split("/") : [],
      kept = id && read(key);
    const text = message ? kept?.content : [kept?.title, ...(kept?.messages ?? []).map((m) => m.content)].join("\n");
    if (id) texts.set(id, `${texts.get(id) ?? ""}\n${text}`.toLowerCase());
  }
  return heads().filter(({ id }) => wanted.every((word) => texts.get(id).includes(word)));
}

// ---- export and import
export const exported = () =>
  JSON.stringify(
    {
      outrider: 1,
      conversations: heads()
        .map((h) => load(h.id))
        .map(({ messages, ...head }) => ({ ...head, messages: [...messages.values()] })),
    },
    null,
    1,
  );

// The known fields of an imported message, if they have the expected types.
function clean(message) {
  const { id, parent, role, content, reasoning, marks, note, refused, media } = withMedia(message);
  if (!/^\w{1,40}$/.test(id) || !["user", "assistant"].includes(role) || typeof content !== "string") return null;
  const texts = Object.entries({ reasoning, note, refused }).filter(([, value]) => typeof value === "string");
  const shown = (Array.isArray(media) ? media : [])
    .filter((i) => typeof i?.url === "string" && /^data:(?:image\/|audio\/|text\/plain[;,])/.test(i.url))
    .map(({ name, url }) => ({ name: String(name ?? ""), url }));
  return {
    id,
    parent: typeof parent === "string" ? parent : null,
    role,
    content,
    ...Object.fromEntries(texts),
    done: true,
    ...(/^(?:\d{1,6}[acbp])+$/.test(marks) ? { marks } : {}),
    ...(shown.length ? { media: shown } : {}),
  };
}

// Returns the number of conversations read. Existing ones (by id) are merged, not replaced.
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (data?.outrider !== 1 || !Array.isArray(data.conversations))
    throw new Error("This file holds no conversations of Outrider.");
  let count = 0;
  for (const { messages, ...head } of data.conversations) {
    const good = (Array.isArray(messages) ? messages : []).map((m) => clean(m ?? {})).filter(Boolean);
    if (!/^\w{1,40}$/.test(head.id) || !good.length) continue;
    const here =
      load(head.id) ??
      new Conversation({
        id: head.id,
        title: String(head.title ?? ""),
        system: String(head.system ?? ""),
        leaf: head.leaf,
        from: head.from ?? null,
      });
    for (const message of good) if (!here.get(message.id)) here.messages.set(message.id, message);
    for (const message of here.messages.values())
      if (!(message.parent < message.id && here.get(message.parent))) message.parent = null;
    if (!here.get(here.leaf)) here.leaf = here.newest(null);
    for (const message of good)
      if (!write(messageKey(here.id, message.id), here.get(message.id), here.id))
        throw new Error("The browser has no room for these conversations.");
    here.keepHead();
    count += 1;
  }
  return count;
}

// Calls `changed(id)` when another window wrote a conversation; without an id everything may have changed.
export function watch(changed) {
  addEventListener("storage", ({ key, storageArea }) => {
    if (storageArea !== localStorage) return;
    if (key === null) changed(null);
    else if (key.startsWith(PREFIX)) changed(key.slice(PREFIX.length).split("/")[0], key);
  });
}
