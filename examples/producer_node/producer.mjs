#!/usr/bin/env node
// The command line of the producer. README.md beside it says how to begin.

import { parseArgs } from "node:util";

import { Client } from "./client.mjs";
import { Listener } from "./listener.mjs";
import { Signer } from "./signer.mjs";

const USAGE = `usage: node producer.mjs VERB …
  start GRAPH THREAD INPUT            [--request-id ID] [--if-running queue|reject] [--by NAME]
  decide [APPROVAL] --verdict VERDICT --by NAME   [--thread THREAD [--graph GRAPH]] [--arguments JSON] [--answer JSON]
                                      [--to NAME]… [--comment TEXT]
  signal THREAD NAME [PAYLOAD]        [--graph GRAPH] [--key KEY] [--by NAME]
  pause | resume | cancel THREAD      [--graph GRAPH] [--reason TEXT] [--by NAME]
  listen QUEUE                        [--kind KIND] [--count N]: one line of JSON for each event
every verb:                           [--id ID] [--timeout SECONDS] [--role NAME]…
INPUT, PAYLOAD, --arguments and --answer are JSON. VERDICT: approve, reject, answer, delegate, request_changes.
environment: KEEPSTEP_BROKER, KEEPSTEP_QUEUE, KEEPSTEP_TENANT, KEEPSTEP_SIGNING_KEY, KEEPSTEP_AUDIENCE
exit code: 0 accepted, 1 refused or not confirmed, 2 the call was wrong`;

const TEXT = { type: "string" };
const LIST = { type: "string", multiple: true };
const COMMON = { id: TEXT, timeout: TEXT, role: LIST, by: TEXT };
const CONTROL = { graph: TEXT, reason: TEXT };

/** For each verb: its options, how many words it takes, and what it asks of a client. */
const VERBS = {
  start: {
    options: { "request-id": TEXT, "if-running": TEXT },
    words: [3, 3],
    send: (client, [graph, thread, input], options) =>
      client.start(graph, thread, json("INPUT", input), {
        request_id: options["request-id"],
        if_running: options["if-running"],
        ...common(options),
      }),
  },
  decide: {
    options: { verdict: TEXT, thread: TEXT, graph: TEXT, arguments: TEXT, answer: TEXT, to: LIST, comment: TEXT },
    words: [0, 1],
    send(client, [approval], { verdict, by, thread, graph, to, comment, ...options }) {
      if (!verdict || !by) throw new TypeError("decide: --verdict and --by are needed");
      if ((approval === undefined) === (thread === undefined)) {
        throw new TypeError("decide: either an approval's id or --thread is needed");
      }
      return client.decide(approval, verdict, by, {
        thread,
        graph,
        to,
        comment,
        arguments: json("--arguments", options.arguments),
        answer: json("--answer", options.answer),
        ...common(options),
      });
    },
  },
  signal: {
    options: { graph: TEXT, key: TEXT },
    words: [2, 3],
    send: (client, [thread, name, payload], { graph, key, ...options }) =>
      client.signal(thread, name, json("PAYLOAD", payload), { graph, key, ...common(options) }),
  },
  ...Object.fromEntries(
    ["pause", "resume", "cancel"].map((action) => [
      action,
      {
        options: CONTROL,
        words: [1, 1],
        send: (client, [thread], { graph, reason, ...options }) =>
          client[action](thread, { graph, reason, ...common(options) }),
      },
    ]),
  ),
};

function common({ id, by, timeout = "10" }) {
  const timeoutSeconds = Number(timeout);
  if (!(timeoutSeconds > 0)) throw new TypeError("--timeout: seconds are needed, more than 0");
  return { timeoutSeconds, ...(id && { id }), ...(by && { by }) };
}

function json(name, text) {
  try {
    return text === undefined ? undefined : JSON.parse(text);
  } catch {
    throw new TypeError(`${name}: JSON is needed`); // what the text was is not shown: it may be a secret
  }
}

async function listen(words, environment) {
  const options = { kind: TEXT, count: TEXT };
  const { values, positionals } = parseArgs({ args: words, options, allowPositionals: true });
  if (positionals.length !== 1) throw new TypeError(USAGE);
  let left = values.count === undefined ? Infinity : Number(values.count);
  if (!(left > 0)) throw new TypeError("--count: a number is needed, more than 0");
  const listener = await Listener.open(positionals[0], {
    broker: environment.KEEPSTEP_BROKER || "redis://localhost:6379/0",
    prefix: environment.KEEPSTEP_QUEUE || undefined,
    tenant: environment.KEEPSTEP_TENANT || undefined,
    kind: values.kind,
  });
  try {
    await listener.each((event) => {
      console.log(JSON.stringify(event));
      return --left > 0;
    });
  } finally {
    listener.close();
  }
}

async function main([name, ...words], environment) {
  if (name === "listen") return listen(words, environment);
  const verb = Object.hasOwn(VERBS, name ?? "") ? VERBS[name] : undefined;
  if (!verb) throw new TypeError(USAGE);
  const { values, positionals } = parseArgs({
    args: words,
    options: { ...COMMON, ...verb.options },
    allowPositionals: true,
  });
  const [fewest, most] = verb.words;
  if (positionals.length < fewest || positionals.length > most) throw new TypeError(USAGE);
  const key = environment.KEEPSTEP_SIGNING_KEY;
  const client = new Client({
    broker: environment.KEEPSTEP_BROKER || "redis://localhost:6379/0",
    queue: environment.KEEPSTEP_QUEUE || undefined,
    tenant: environment.KEEPSTEP_TENANT || undefined,
    signer: key ? new Signer(key, environment.KEEPSTEP_AUDIENCE || "keepstep") : undefined,
    roles: values.role,
  });
  try {
    console.log(JSON.stringify(await verb.send(client, positionals, values)));
  } finally {
    await client.close();
  }
}

main(process.argv.slice(2), process.env).catch((error) => {
  console.error(error instanceof TypeError ? error.message : `${error.code ?? error.name}: ${error.message}`);
  process.exitCode = error instanceof TypeError ? 2 : 1;
});
