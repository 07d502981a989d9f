// Sends commands to a Keepstep deployment through Redis. Messages are those of docs/messages.md and docs/asyncapi.json.

import { randomBytes, randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";

import { BrokerUnavailable, Redis } from "./redis.mjs";

const RESEND_SECONDS_MIN = 2;
const RESEND_SECONDS_MAX = 10;
const RECONNECT_SECONDS = 0.2;
const ANSWER_SECONDS = 2; // more than a request that waits says that it waits

/** A worker refused the command, and nothing was changed; `code` is stable, the message is for people. */
export class Refused extends Error {
  constructor({ code, message }) {
    super(message);
    this.code = code;
  }
}

/** No worker has said anything in time: the command may still be accepted, and may be sent again with the same id. */
export class NotConfirmed extends Error {
  code = "not_confirmed";
}

/** Sends one command after the other, each until a worker has said accepted or refused. */
export class Client {
  #options;
  #redis = null;
  #repliesQueue;
  #last = Promise.resolve();

  constructor({ broker, queue = "keepstep", tenant = "default", application = "default", signer, roles = [] }) {
    this.#options = { broker, queue, tenant, application, signer, roles };
    this.#repliesQueue = `${queue}.replies.${newId()}`;
  }

  /** Give `thread` of `graph` an input, which makes a run. Two starts with one `request_id` are one run. */
  start(graph, thread, input, options) {
    return this.#send("start", { ...this.#place(graph, thread), input }, options);
  }

  /** Decide the approval that is named, or the only one that `options.thread` asks. */
  decide(approval, verdict, by, { thread, graph, ...options } = {}) {
    const place = approval === undefined ? this.#place(graph, thread) : { approval };
    return this.#send("decide", { ...place, verdict, by }, options);
  }

  signal(thread, name, payload, { graph, ...options } = {}) {
    return this.#send("signal", { ...this.#place(graph, thread), name, payload }, options);
  }

  pause(thread, options) {
    return this.#control("pause", thread, options);
  }

  resume(thread, options) {
    return this.#control("resume", thread, options);
  }

  cancel(thread, options) {
    return this.#control("cancel", thread, options);
  }

  async close() {
    // Tidying up: a reply that comes later vanishes by itself after ten minutes.
    await this.#redis?.ask(["DEL", this.#repliesQueue]).catch(() => {});
    this.#redis?.close();
  }

  #control(action, thread, { graph, ...options } = {}) {
    return this.#send("control", { ...this.#place(graph, thread), action }, options);
  }

  #place(graph, thread) {
    return { application: this.#options.application, graph, thread };
  }

  /** Send a command when the one before has its reply; `options` are fields of it, and `id` and `timeoutSeconds`. */
  #send(verb, fields, { id = newId(), timeoutSeconds = 10, ...more } = {}) {
    const { tenant, signer, roles } = this.#options;
    const checked = JSON.stringify({ v: 1, verb, id, tenant, ...fields, ...more }, onlyJson);
    const command = JSON.parse(checked);
    const body = signer ? JSON.stringify(signer.signed(command, command.by ?? signer.kid, roles)) : checked;
    const sent = this.#last.then(() => this.#confirmed(id, body, timeoutSeconds));
    this.#last = sent.catch(() => {});
    return sent;
  }

  /** Return the worker's reply; throw `Refused`, `NotConfirmed` or `BrokerUnavailable`. */
  async #confirmed(id, body, timeoutSeconds) {
    const deadline = Date.now() + timeoutSeconds * 1000;
    let resendSeconds = RESEND_SECONDS_MIN;
    for (;;) {
      const lookUntil = Math.min(deadline, Date.now() + resendSeconds * 1000);
      try {
        this.#redis ??= await Redis.connect(this.#options.broker, timeoutSeconds);
        await this.#redis.ask(["LPUSH", this.#commandsQueue, this.#envelope(id, body)]);
        const reply = await this.#reply(id, lookUntil);
        if (reply?.status === "accepted") return reply;
        if (reply) throw new Refused(reply.error);
      } catch (error) {
        if (!(error instanceof BrokerUnavailable)) throw error;
        this.#redis = null;
        if (Date.now() + RECONNECT_SECONDS * 1000 >= deadline) throw error;
        await pause(RECONNECT_SECONDS * 1000);
        continue; // whether it was sent is unknown, so it is sent again: with its id it is one command
      }
      if (Date.now() >= deadline) {
        throw new NotConfirmed(`no worker has confirmed command ${id} within ${timeoutSeconds} s`);
      }
      resendSeconds = Math.min(resendSeconds * 2, RESEND_SECONDS_MAX);
    }
  }

  /** Return the reply to a command, or null when none has come by `lookUntil` (milliseconds since 1970). */
  async #reply(id, lookUntil) {
    for (let left = lookUntil - Date.now(); left > 0; left = lookUntil - Date.now()) {
      const seconds = left / 1000;
      const request = ["BRPOP", this.#repliesQueue, seconds.toFixed(3)];
      const found = await this.#redis.ask(request, seconds + ANSWER_SECONDS);
      if (found === null) return null;
      const reply = JSON.parse(Buffer.from(JSON.parse(found[1]).body, "base64").toString());
      if (reply.id === id) return reply; // another one answers a command that was given up, or sent twice
    }
    return null;
  }

  get #commandsQueue() {
    return `${this.#options.queue}.commands`;
  }

  /** Return the message as Kombu writes it to Redis, where a message is one text. */
  #envelope(id, body) {
    return JSON.stringify({
      body: Buffer.from(body).toString("base64"),
      "content-type": "application/json",
      "content-encoding": "utf-8",
      headers: { sent_at: Date.now() / 1000 },
      properties: {
        correlation_id: id,
        reply_to: this.#repliesQueue,
        delivery_mode: 2,
        delivery_info: { exchange: "", routing_key: this.#commandsQueue },
        priority: 0,
        body_encoding: "base64",
        delivery_tag: randomUUID(), // of this sending: workers keep by it what they have not acknowledged
      },
    });
  }
}

/** Refuse numbers that would arrive as others: NaN would be null, and a long number has lost digits by now. */
function onlyJson(key, value) {
  if (typeof value === "number" && (Number.isInteger(value) ? !Number.isSafeInteger(value) : !Number.isFinite(value))) {
    throw new TypeError(`${key}: this number is not exact in JavaScript, or not JSON; send a string`);
  }
  return value;
}

/** Return a new id: 48 bits of milliseconds and 80 random ones, in hexadecimal digits; ids sort by time. */
function newId() {
  return Date.now().toString(16).padStart(12, "0") + randomBytes(10).toString("hex");
}
