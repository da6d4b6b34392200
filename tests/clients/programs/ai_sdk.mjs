// Vercel's AI SDK: `ai` with `@ai-sdk/openai-compatible`.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import * as h from "./harness.mjs";

const MODULES = process.env.CLIENTS_NODE_MODULES;
const load = (path) => import(pathToFileURL(`${MODULES}/${path}`).href);
const { generateText, streamText, tool, stepCountIs, isStepCount, Output } = await load("ai/dist/index.js");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible/dist/index.js");
const { z } = await load("zod/index.js");

const provider = createOpenAICompatible({
  name: "penstock", baseURL: h.BASE, apiKey: h.KEY, supportsStructuredOutputs: true, includeUsage: true,
});
const common = { model: provider.chatModel(h.MODEL), temperature: 0, maxRetries: 0 };
const getWeather = tool({
  description: "Current weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    assert.equal(city, "Oslo");
    return { result: h.REPORTED };
  },
});
const Person = z.object({ name: z.string(), age: z.number().int() });

h.check("chat", "generateText", async () => {
  const { text, usage } = await generateText({ ...common, prompt: h.SUM });
  assert.match(text, new RegExp(h.SUM_IS));
  assert.ok(usage.outputTokens > 0);
});

h.check("stream", "streamText", async () => {
  const pieces = [];
  for await (const piece of streamText({ ...common, prompt: h.SUM }).textStream) pieces.push(piece);
  h.several(pieces);
  assert.match(pieces.join(""), new RegExp(h.SUM_IS));
});

h.check("tools", "generateText and streamText with a tool, two steps", async () => {
  const options = {
    ...common, prompt: h.WEATHER, tools: { get_weather: getWeather }, stopWhen: (stepCountIs ?? isStepCount)(2),
  };
  const { text, steps } = await generateText(options);
  assert.equal(steps.length, 2);
  assert.match(text, new RegExp(h.REPORTED));
  assert.match(await streamText(options).text, new RegExp(h.REPORTED));
});

h.check("forced", "toolChoice required", async () => {
  const { toolCalls } = await generateText({
    ...common,
    prompt: "Hello!",
    tools: { get_weather: tool({ description: "Current weather of a city", inputSchema: z.object({ city: z.string() }) }) },
    toolChoice: "required",
  });
  assert.equal(typeof toolCalls[0].input.city, "string");
});

h.check("schema", "Output.object", async () => {
  const { output } = await generateText({ ...common, prompt: h.PERSON, output: Output.object({ schema: Person }) });
  assert.deepEqual(output, h.PERSON_IS);
});

h.check("schema", "streamText with Output.object", async () => {
  const seen = [];
  const { partialOutputStream } = streamText({ ...common, prompt: h.PERSON, output: Output.object({ schema: Person }) });
  for await (const partial of partialOutputStream) seen.push(partial);
  h.several(seen);
  assert.deepEqual(seen.at(-1), h.PERSON_IS);
});

h.check("reasoning", "reasoningText", async () => {
  const { text, reasoningText } = await generateText({ ...common, prompt: `${h.SUM} /think` });
  assert.ok(reasoningText.length > 0);
  assert.match(text, new RegExp(h.SUM_IS));
});

h.check("completions", "completionModel", async () => {
  const prompt = "<|im_start|>user\nWhat is 347 + 586?<|im_end|>\n<|im_start|>assistant\n";
  const { text } = await generateText({
    ...common, model: provider.completionModel(h.MODEL), prompt, maxOutputTokens: 20,
  });
  assert.match(text, /\d/);
});

h.check("errors", "APICallError", async () => {
  await assert.rejects(
    generateText({ ...common, model: provider.chatModel("missing"), prompt: h.SUM }),
    (error) => error.statusCode === 404,
  );
});

await h.run(MODULES, "ai", "@ai-sdk/openai-compatible");
