// Conversations, kept in this browser and nowhere else. One entry each, so that two open windows don't overwrite each other.
//
// { id, title, system, updated, from, messages: [{ role, content, ... }] }; `from` is the first message that is still sent
// (earlier ones no longer fit the context).

const PREFIX = "outrider.chat.";

export const create = (system = "") => ({ id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", system, updated: 0, from: 0, messages: [] });

export function load(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(found?.messages) ? found : null;
  } catch { return null; }
}

export function all() {
  const ids = Object.keys(localStorage).filter((k) => k.startsWith(PREFIX)).map((k) => k.slice(PREFIX.length));
  return ids.map(load).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

// When the browser has no more room, the oldest conversations go.
export function save(conversation) {
  conversation.updated = Date.now();
  conversation.title ||= conversation.messages.find((m) => m.role === "user")?.content.trim().slice(0, 60) ?? "";
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      const oldest = all().filter((c) => c.id !== conversation.id).at(-1);
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);
