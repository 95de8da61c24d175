// The Vercel AI SDK against a server: chat, stream, tools with their results sent back, structured output, embeddings.
// node vercel.mjs http://127.0.0.1:8000/v1 MODEL
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "outrider", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true });
const model = provider(name);
const common = { model, seed: 1, temperature: 0, maxRetries: 0, maxOutputTokens: 16 };
const zone = z.enum(["UTC", "CET"]);
const time = tool({ description: "the time", inputSchema: z.object({ zone }), execute: async ({ zone }) => `12:00 ${zone}` });

const checks = {
  async chat() {
    const answer = await generateText({ ...common, prompt: "hello" });
    assert.ok(answer.text.length > 0);
    assert.equal(answer.finishReason, "length");
    assert.equal(answer.usage.outputTokens, 16);
  },
  async stream() {
    const whole = await generateText({ ...common, prompt: "hello" });
    const stream = streamText({ ...common, prompt: "hello", onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, 16);
  },
  async history() {
    const first = await generateText({ ...common, messages: [{ role: "user", content: "hello" }] });
    const messages = [{ role: "user", content: "hello" }, ...first.response.messages, { role: "user", content: "and then?" }];
    const second = await generateText({ ...common, system: "be brief", messages });
    assert.ok(second.usage.inputTokens > first.usage.inputTokens);
  },
  async tools() {
    const ask = { ...common, maxOutputTokens: 200, tools: { time }, toolChoice: "required", providerOptions: { outrider: { parallel_tool_calls: false } } };
    const answer = await generateText({ ...ask, prompt: "what time is it?", stopWhen: stepCountIs(1) });
    assert.ok(answer.toolCalls.length > 0);
    assert.ok(answer.toolCalls.every((call) => call.toolName === "time" && zone.safeParse(call.input.zone).success));
    assert.match(answer.toolResults[0].output, /12:00/);
    const messages = [{ role: "user", content: "what time is it?" }, ...answer.response.messages]; // the call and its result
    const after = await generateText({ ...common, tools: { time }, toolChoice: "none", messages });
    assert.ok(after.text.length > 0);
  },
  async toolsInAStream() {
    const ask = { ...common, maxOutputTokens: 200, tools: { time }, toolChoice: { type: "tool", toolName: "time" } };
    const stream = streamText({ ...ask, prompt: "what time is it?", stopWhen: stepCountIs(1), onError: ({ error }) => { throw error; } });
    const calls = await stream.toolCalls;
    assert.ok(calls.length === 1 && zone.safeParse(calls[0].input.zone).success);
  },
  async object() {
    const schema = z.object({ zone, sure: z.boolean() });
    const answer = await generateObject({ ...common, maxOutputTokens: 200, schema, prompt: "which zone?" });
    assert.ok(schema.safeParse(answer.object).success);
  },
  async embeddings() {
    const { embeddings, usage } = await embedMany({ model: provider.textEmbeddingModel(name), values: ["one", "two"], maxRetries: 0 });
    assert.ok(embeddings.length === 2 && embeddings[0].length > 8 && usage.tokens > 0);
  },
};

let failed = 0;
for (const [what, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${what}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${what}: ${error.stack}\n${error.responseBody ?? ""}`);
  }
}
process.exit(failed ? 1 : 0);
