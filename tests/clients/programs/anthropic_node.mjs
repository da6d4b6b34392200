// The `@anthropic-ai/sdk` package for Node.js.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import * as h from "./harness.mjs";

const MODULES = process.env.CLIENTS_NODE_MODULES;
const require = createRequire(`${MODULES}/`);
const Anthropic = require("@anthropic-ai/sdk").default;

const client = new Anthropic({ baseURL: h.URL, apiKey: h.KEY, maxRetries: 0 });
const question = [{ role: "user", content: h.WEATHER }];
const tool = { name: "get_weather", description: "Current weather of a city", input_schema: h.CITY_SCHEMA };
const common = { model: h.MODEL, max_tokens: 100, temperature: 0 };

h.check("chat", "messages.create", async () => {
  const answer = await client.messages.create({ ...common, messages: [{ role: "user", content: h.SUM }] });
  assert.equal(answer.stop_reason, "end_turn");
  assert.match(answer.content.at(-1).text, new RegExp(h.SUM_IS));
});

h.check("stream", "messages.stream", async () => {
  const pieces = [];
  const stream = client.messages.stream({ ...common, messages: [{ role: "user", content: h.SUM }] });
  stream.on("text", (text) => pieces.push(text));
  const message = await stream.finalMessage();
  h.several(pieces);
  assert.equal(pieces.join(""), message.content.at(-1).text);
  assert.match(pieces.join(""), new RegExp(h.SUM_IS));
});

h.check("tools", "a streamed call, its result, and the answer", async () => {
  const asked = await client.messages.stream({ ...common, messages: question, tools: [tool] }).finalMessage();
  const call = asked.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Oslo" });
  const result = { type: "tool_result", tool_use_id: call.id, content: h.REPORT };
  const told = [...question, { role: "assistant", content: asked.content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ ...common, messages: told, tools: [tool] });
  assert.match(answer.content.at(-1).text, new RegExp(h.REPORTED));
});

h.check("forced", "tool_choice any, tool", async () => {
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "get_weather" }]) {
    const answer = await client.messages.create({
      model: h.MODEL, max_tokens: 100, messages: [{ role: "user", content: "Hello!" }], tools: [tool], tool_choice,
    });
    assert.equal(typeof answer.content.find((block) => block.type === "tool_use").input.city, "string");
  }
});

h.check("messages", "messages.countTokens", async () => {
  const counted = await client.messages.countTokens({ model: h.MODEL, messages: question });
  assert.ok(counted.input_tokens > 5);
});

h.check("keys", "x-api-key, and a wrong key: AuthenticationError", async () => {
  const other = new Anthropic({ baseURL: h.URL, apiKey: "sk-wrong", maxRetries: 0 });
  await assert.rejects(other.messages.create({ ...common, messages: question }), Anthropic.AuthenticationError);
});

h.check("errors", "NotFoundError", async () => {
  await assert.rejects(client.messages.create({ ...common, model: "missing", messages: question }), Anthropic.NotFoundError);
});

await h.run(MODULES, "@anthropic-ai/sdk");
