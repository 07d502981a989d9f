// Hears what happens in a Keepstep deployment, through Redis. Events are those of docs/messages.md.

import { Redis } from "./redis.mjs";

const SEPARATOR = "\u0006\u0016";
const WAIT_SECONDS = 5;
const ANSWER_SECONDS = 2; // more than a request that waits says that it waits

/**
 * Gathers events in a list of its own, from when it is opened, and hands them out one by one; for one process at a
 * time. An event that was handed out and not finished is handed out again by the next one who opens the queue, and any
 * may come twice: its `id` tells.
 */
export class Listener {
  #redis;
  #queue;
  #tenant;

  /** `kind`: `approval.opened`, `approval.*` or `*`. */
  static async open(queue, { broker, prefix = "keepstep", tenant = "default", kind = "*", timeoutSeconds = 10 }) {
    const listener = new Listener();
    listener.#queue = queue;
    listener.#tenant = tenant;
    listener.#redis = await Redis.connect(broker, timeoutSeconds);
    const [family, rest = "*"] = kind.split(".");
    const pattern = `${family}.${rest}.${word(tenant)}.*`;
    const literal = pattern.replace(/[^A-Za-z0-9_.*-]/gu, (sign) => `\\${sign}`);
    const expression = `^${literal.replaceAll(".", "\\.").replaceAll("*", "[^.]+")}$`;
    const binding = [pattern, expression, queue].join(SEPARATOR);
    await listener.#redis.ask(["SADD", `_kombu.binding.${prefix}.events`, binding]);
    // What somebody who died was handling is first again.
    while ((await listener.#redis.ask(["LMOVE", listener.#handling, queue, "LEFT", "RIGHT"])) !== null);
    return listener;
  }

  get #handling() {
    return `${this.#queue}.handling`;
  }

  /** Call `handle` with each event, in order; go on for ever, or until it returns false. */
  async each(handle) {
    for (;;) {
      const request = ["BLMOVE", this.#queue, this.#handling, "RIGHT", "LEFT", String(WAIT_SECONDS)];
      const message = await this.#redis.ask(request, WAIT_SECONDS + ANSWER_SECONDS);
      if (message === null) continue;
      const event = read(message);
      // Another tenant's name may be the same word in a routing key.
      const goesOn = event?.tenant === this.#tenant ? await handle(event) : true;
      await this.#redis.ask(["LREM", this.#handling, "1", message]);
      if (goesOn === false) return;
    }
  }

  close() {
    this.#redis.close();
  }
}

/** Return a name as one word of a routing key. */
function word(name) {
  return [...name].map((sign) => (/[A-Za-z0-9_-]/.test(sign) ? sign : "_")).slice(0, 80).join("");
}

/** Return the event in a message, or null: whoever may write to the broker may write something else there. */
function read(message) {
  try {
    return JSON.parse(Buffer.from(JSON.parse(message).body, "base64").toString());
  } catch {
    return null;
  }
}
