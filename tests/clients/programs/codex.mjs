// Codex, with a tool of an MCP server. Its usual instructions and most of its own tools are turned off: with them its
// prompt has more tokens than the context of the demo model.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { fileURLToPath } from "node:url";
import * as h from "./harness.mjs";

const MODULES = process.env.CLIENTS_NODE_MODULES;
const PROGRAMS = dirname(fileURLToPath(import.meta.url));
const home = mkdtempSync(`${process.env.HOME}/codex-`);
const calls = `${home}/calls`;
writeFileSync(`${home}/instructions.md`, "You are a coding agent.");
writeFileSync(`${home}/config.toml`, `
model = "${h.MODEL}"
model_provider = "penstock"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_instructions_file = "${home}/instructions.md"
include_permissions_instructions = false
include_apps_instructions = false
include_environment_context = false
include_collaboration_mode_instructions = false
[features]
multi_agent = false
goals = false
shell_tool = false
unified_exec = false
view_image = false
collaboration_modes = false
skill_search = false
plugins = false
apps = false
[skills]
include_instructions = false
[skills.bundled]
enabled = false
[model_providers.penstock]
name = "Penstock"
base_url = "${h.BASE}"
wire_api = "responses"
env_key = "CLIENTS_KEY"
[mcp_servers.timer]
command = "${process.env.CLIENTS_PYTHON}"
args = ["${PROGRAMS}/mcp_timer.py", "${calls}"]
`);

function codex(...args) {
  const answer = `${home}/answer`;
  const { status, stdout, stderr } = spawnSync(
    process.execPath,
    [`${MODULES}/@openai/codex/bin/codex.js`, "exec", "--json", "--skip-git-repo-check", "-o", answer, ...args],
    { cwd: home, env: { ...process.env, CODEX_HOME: home }, stdio: ["ignore", "pipe", "pipe"], timeout: 55_000 },
  );
  assert.equal(status, 0, stderr.toString().slice(-300));
  const events = stdout.toString().trim().split("\n").map((line) => JSON.parse(line));
  const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
  return { answer: readFileSync(answer, "utf-8"), items };
}

h.check("responses", "a conversation: a call of a tool in a namespace, its result, the answer", async () => {
  const { answer, items } = codex("Set a timer for 5 minutes.");
  assert.ok(existsSync(calls), `no tool was called; ${answer}`);
  assert.deepEqual(JSON.parse(readFileSync(calls, "utf-8").trim()), { minutes: 5 });
  const kinds = items.map((item) => item.type).filter((kind) => kind === "mcp_tool_call" || kind === "agent_message");
  assert.deepEqual(kinds, ["mcp_tool_call", "agent_message"]);
  assert.ok(answer.length > 0); // the demo model cannot read the form in which Codex reports results
});
h.check("chat", "a question", async () => {
  assert.match(codex(h.SUM).answer, new RegExp(h.SUM_IS));
});

await h.run(MODULES, "@openai/codex");
