// The `openai` package for Node.js.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import * as h from "./harness.mjs";

const MODULES = process.env.CLIENTS_NODE_MODULES;
const require = createRequire(`${MODULES}/`);
const OpenAI = require("openai").default;
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const client = new OpenAI({ baseURL: h.BASE, apiKey: h.KEY, maxRetries: 0 });
const ask = [{ role: "user", content: h.SUM }];
const question = [{ role: "user", content: h.WEATHER }];
const tool = {
  type: "function",
  function: { name: "get_weather", description: "Current weather of a city", parameters: h.CITY_SCHEMA },
};
const common = { model: h.MODEL, temperature: 0 };

h.check("chat", "chat.completions.create", async () => {
  const answer = await client.chat.completions.create({ ...common, messages: ask });
  assert.match(answer.choices[0].message.content, new RegExp(h.SUM_IS));
});

h.check("stream", "stream: true, with usage", async () => {
  const pieces = [];
  let usage;
  const stream = await client.chat.completions.create({
    ...common, messages: ask, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) pieces.push(chunk.choices[0].delta.content);
    usage = chunk.usage ?? usage;
  }
  h.several(pieces);
  assert.match(pieces.join(""), new RegExp(h.SUM_IS));
  assert.ok(usage.completion_tokens > 0);
});

h.check("tools", "runTools: a call, its result, and the answer", async () => {
  const runner = client.chat.completions.runTools({
    ...common,
    messages: question,
    tools: [{
      type: "function",
      function: {
        ...tool.function, parse: JSON.parse,
        function: ({ city }) => { assert.equal(city, "Oslo"); return h.REPORT; },
      },
    }],
  });
  assert.match(await runner.finalContent(), new RegExp(h.REPORTED));
});

h.check("tools", "a streamed call", async () => {
  let chunks = 0;
  let text = "";
  const stream = await client.chat.completions.create({ ...common, messages: question, tools: [tool], stream: true });
  for await (const chunk of stream) {
    for (const call of chunk.choices[0]?.delta.tool_calls ?? []) {
      chunks += 1;
      text += call.function.arguments ?? "";
    }
  }
  assert.ok(chunks >= 2);
  assert.deepEqual(JSON.parse(text), { city: "Oslo" });
});

h.check("forced", "tool_choice required, named", async () => {
  for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
    const answer = await client.chat.completions.create({
      model: h.MODEL, messages: [{ role: "user", content: "Hello!" }], tools: [tool], tool_choice,
    });
    assert.equal(typeof JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city, "string");
  }
});

const Person = z.object({ name: z.string(), age: z.number().int() });

h.check("schema", "chat.completions.parse with zod", async () => {
  const answer = await client.chat.completions.parse({
    ...common, messages: [{ role: "user", content: h.PERSON }], response_format: zodResponseFormat(Person, "person"),
  });
  assert.deepEqual(answer.choices[0].message.parsed, h.PERSON_IS);
});

h.check("json", "response_format json_object", async () => {
  const answer = await client.chat.completions.create({
    ...common, messages: [{ role: "user", content: h.PERSON }], response_format: { type: "json_object" },
  });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), h.PERSON_IS);
});

h.check("logprobs", "logprobs and top_logprobs", async () => {
  const answer = await client.chat.completions.create({ ...common, messages: ask, logprobs: true, top_logprobs: 2 });
  assert.ok(answer.choices[0].logprobs.content.every((each) => each.logprob <= 0 && each.top_logprobs.length === 2));
});

h.check("completions", "completions.create, three prompts", async () => {
  const prompt = "<|im_start|>user\nWhat is 347 + 586?<|im_end|>\n<|im_start|>assistant\n";
  const answer = await client.completions.create({ ...common, prompt: [prompt, prompt, prompt], max_tokens: 20 });
  assert.equal(answer.choices.length, 3);
  assert.ok(answer.choices.every((each) => each.text.includes(h.SUM_IS)));
});

h.check("responses", "responses.create, continued, and streamed", async () => {
  const first = await client.responses.create({ ...common, input: "My name is Mia." });
  const second = await client.responses.create({
    ...common, input: "What is my name?", previous_response_id: first.id,
  });
  assert.match(second.output_text, /Mia/);
  const pieces = [];
  for await (const event of client.responses.stream({ ...common, input: h.SUM })) {
    if (event.type === "response.output_text.delta") pieces.push(event.delta);
  }
  h.several(pieces);
  assert.match(pieces.join(""), new RegExp(h.SUM_IS));
});

h.check("embeddings", "embeddings.create", async () => {
  const { data } = await client.embeddings.create({ model: h.MODEL, input: ["the sea", "the mountain", "the sea"] });
  const [sea, mountain, again] = data.map((each) => each.embedding);
  assert.deepEqual(sea, again);
  assert.notDeepEqual(sea, mountain);
});

h.check("keys", "a wrong key: AuthenticationError", async () => {
  const other = new OpenAI({ baseURL: h.BASE, apiKey: "sk-wrong", maxRetries: 0 });
  await assert.rejects(other.chat.completions.create({ model: h.MODEL, messages: ask }), OpenAI.AuthenticationError);
});

h.check("models", "models.list", async () => {
  const models = await client.models.list();
  assert.ok(models.data.some((each) => each.id === h.MODEL));
});

h.check("errors", "NotFoundError", async () => {
  await assert.rejects(client.chat.completions.create({ model: "missing", messages: ask }), OpenAI.NotFoundError);
});

await h.run(MODULES, "openai");
