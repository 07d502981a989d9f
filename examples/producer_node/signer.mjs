// Signs commands: a JSON Web Token (RFC 7519) that carries the whole command, made with an Ed25519 key.

import { createPrivateKey, sign } from "node:crypto";
import { readFileSync } from "node:fs";

const LIFETIME_SECONDS = 3600;

export class Signer {
  #key;

  /** Read the private JSON Web Key in the file `path`, as `keepstep new-key` writes it. */
  constructor(path, audience) {
    try {
      const found = JSON.parse(readFileSync(path, "utf8"));
      this.#key = createPrivateKey({ key: found, format: "jwk" });
      this.kid = found.kid;
    } catch {
      // Told below: the error's own words may quote the key.
    }
    if (this.#key?.asymmetricKeyType !== "ed25519" || typeof this.kid !== "string") {
      throw new TypeError(`KEEPSTEP_SIGNING_KEY: ${path} must hold a private Ed25519 key (a JSON Web Key) with a kid`);
    }
    this.audience = audience;
  }

  /** Return the message that carries `command` as the word of `principal`, who has these `roles`. */
  signed(command, principal, roles = []) {
    const now = Math.floor(Date.now() / 1000);
    const header = { alg: "EdDSA", kid: this.kid, typ: "JWT" };
    const claims = {
      sub: principal,
      aud: this.audience,
      jti: command.id, // a token counts once, however often it is sent
      iat: now,
      exp: now + LIFETIME_SECONDS,
      command,
      ...(roles.length && { roles }),
    };
    const text = [header, claims].map((part) => encoded(JSON.stringify(part))).join(".");
    return { v: 1, jwt: `${text}.${encoded(sign(null, Buffer.from(text), this.#key))}` };
  }
}

function encoded(value) {
  return Buffer.from(value).toString("base64url");
}
