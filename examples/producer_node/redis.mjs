// As much of a Redis client as a producer needs: one connection that asks one thing after the other (RESP 2).

import { readFileSync } from "node:fs";
import net from "node:net";
import tls from "node:tls";

export class BrokerUnavailable extends Error {
  code = "broker_unavailable";
}

/** What Redis itself answered to a request that it did not like. */
export class RedisError extends Error {
  code = "broker_refused";
}

/** One connection. After an error of the network, or an answer that does not come, it is of no use: connect again. */
export class Redis {
  #socket;
  #timeoutSeconds;
  #received = Buffer.alloc(0);
  #waiting = [];
  #failure = null;

  /**
   * Connect to `redis://` or `rediss://[user:password@]host[:port][/database]`. No answer may take longer than
   * `timeoutSeconds`.
   */
  static async connect(url, timeoutSeconds) {
    const { protocol, hostname, port, username, password, pathname, searchParams } = new URL(url);
    if (protocol !== "redis:" && protocol !== "rediss:") {
      // The URL is not shown: it may hold a password.
      throw new TypeError("KEEPSTEP_BROKER: a URL that begins with redis:// or rediss:// is needed");
    }
    const place = { host: hostname.replace(/^\[|\]$/g, ""), port: Number(port || 6379) };
    const authority = searchParams.get("ssl_ca_certs");
    const socket =
      protocol === "redis:"
        ? net.connect(place)
        : tls.connect({ ...place, servername: place.host, ...(authority && { ca: readFileSync(authority) }) });
    const redis = new Redis(socket, timeoutSeconds);
    await redis.#awaited(timeoutSeconds, (opened) => {
      socket.once(protocol === "redis:" ? "connect" : "secureConnect", () => opened());
    });
    try {
      const user = username ? [decodeURIComponent(username)] : [];
      if (password) await redis.ask(["AUTH", ...user, decodeURIComponent(password)]);
      const database = pathname.slice(1);
      if (database && database !== "0") await redis.ask(["SELECT", database]);
    } catch (error) {
      redis.close(); // an open socket would keep the process
      throw error;
    }
    return redis;
  }

  constructor(socket, timeoutSeconds) {
    this.#socket = socket;
    this.#timeoutSeconds = timeoutSeconds;
    socket.setKeepAlive(true);
    socket.on("data", (data) => this.#take(data));
    socket.on("error", (error) => this.#fail(error.code ?? error.message));
    socket.on("close", () => this.#fail("the connection was closed"));
  }

  /** Send one request; return what Redis answers: a string, a number, null or an array of these. */
  ask(words, timeoutSeconds = this.#timeoutSeconds) {
    const parts = words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`);
    return this.#awaited(timeoutSeconds, () => this.#socket.write(`*${words.length}\r\n${parts.join("")}`));
  }

  close() {
    this.#fail("closed");
  }

  /** Begin something; return what comes back for it. */
  #awaited(timeoutSeconds, begin) {
    if (this.#failure) return Promise.reject(this.#failure);
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => this.#fail(`no answer within ${timeoutSeconds} s`), timeoutSeconds * 1000);
      const settled = (settle) => (value) => (clearTimeout(timer), settle(value));
      this.#waiting.push({ resolve: settled(resolve), reject: settled(reject) });
      begin(() => this.#waiting.shift()?.resolve());
    });
  }

  #take(data) {
    this.#received = Buffer.concat([this.#received, data]);
    for (let found = parsed(this.#received, 0); found; found = parsed(this.#received, 0)) {
      this.#received = this.#received.subarray(found.end);
      const { resolve, reject } = this.#waiting.shift();
      if (found.value instanceof RedisError) reject(found.value);
      else resolve(found.value);
    }
  }

  #fail(reason) {
    this.#failure ??= new BrokerUnavailable(`Redis cannot be reached: ${reason}`);
    this.#socket.destroy();
    for (const { reject } of this.#waiting.splice(0)) reject(this.#failure);
  }
}

/** Return the answer that begins at `start` and where it ends, or null when it has not arrived whole. */
function parsed(bytes, start) {
  const lineEnd = bytes.indexOf("\r\n", start);
  if (lineEnd < 0) return null;
  const kind = String.fromCharCode(bytes[start]);
  const line = bytes.toString("utf8", start + 1, lineEnd);
  const next = lineEnd + 2;
  if (kind === "+") return { value: line, end: next };
  if (kind === "-") return { value: new RedisError(line), end: next };
  if (kind === ":") return { value: Number(line), end: next };
  const length = Number(line);
  if (length < 0) return { value: null, end: next };
  if (kind === "$") {
    const end = next + length;
    return bytes.length < end + 2 ? null : { value: bytes.toString("utf8", next, end), end: end + 2 };
  }
  const items = [];
  let end = next;
  while (items.length < length) {
    const item = parsed(bytes, end);
    if (!item) return null;
    items.push(item.value);
    end = item.end;
  }
  return { value: items, end };
}
