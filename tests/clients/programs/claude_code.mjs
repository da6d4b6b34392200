// Claude Code, started by its own SDK, with one tool. Its usual prompt, with all its tools, has more tokens than the
// context of the demo model.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import * as h from "./harness.mjs";

const MODULES = process.env.CLIENTS_NODE_MODULES;
const load = (path) => import(pathToFileURL(`${MODULES}/${path}`).href);
const { createSdkMcpServer, query, tool } = await load("@anthropic-ai/claude-agent-sdk/sdk.mjs");
const { z } = await load("zod/index.js");

let asked = [];
const getWeather = tool("get_weather", "Current weather of a city", { city: z.string() }, async (given) => {
  asked.push(given);
  return { content: [{ type: "text", text: h.REPORT }] };
});
const OPTIONS = {
  model: h.MODEL,
  systemPrompt: " ",
  tools: [],
  settingSources: [],
  allowedTools: ["get_weather", "mcp__weather__get_weather"],
  env: {
    ...process.env,
    ANTHROPIC_BASE_URL: h.URL,
    ANTHROPIC_API_KEY: h.KEY,
    CLAUDE_AGENT_SDK_MCP_NO_PREFIX: "1",
    CLAUDE_CODE_ATTRIBUTION_HEADER: "0",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_SIMPLE: "1",
  },
};

async function talk(prompt, options = {}) {
  let result;
  let pieces = 0;
  for await (const message of query({ prompt, options: { ...OPTIONS, ...options } })) {
    if (message.type === "stream_event" && message.event.type === "content_block_delta") pieces += 1;
    if (message.type === "result") result = message;
  }
  assert.equal(result.is_error, false, result.result);
  return { ...result, pieces };
}

h.check("messages", "a conversation: a call of a tool, its result, the answer", async () => {
  asked = [];
  const weather = createSdkMcpServer({ name: "weather", version: "1", tools: [getWeather] });
  const { result, num_turns } = await talk(h.WEATHER, { mcpServers: { weather } });
  assert.deepEqual(asked, [{ city: "Oslo" }]);
  assert.equal(num_turns, 2);
  assert.match(result, new RegExp(h.REPORTED));
});
h.check("tools", "the tool was called with the city, and the answer tells its result", async () => {
  asked = [];
  const weather = createSdkMcpServer({ name: "weather", version: "1", tools: [getWeather] });
  const { result } = await talk("What is the weather in Rome?", { mcpServers: { weather } });
  assert.deepEqual(asked, [{ city: "Rome" }]);
  assert.match(result, new RegExp(h.REPORTED));
});
h.check("chat", "a question, and another one in the resumed session", async () => {
  const first = await talk(h.SUM);
  assert.match(first.result, new RegExp(h.SUM_IS));
  const second = await talk("What is 12 + 30?", { resume: first.session_id });
  assert.match(second.result, /42/);
});
h.check("stream", "includePartialMessages", async () => {
  const { pieces, result } = await talk(h.SUM, { includePartialMessages: true });
  assert.ok(pieces >= 3);
  assert.match(result, new RegExp(h.SUM_IS));
});

await h.run(MODULES, "@anthropic-ai/claude-agent-sdk");
