// Vercel's AI SDK, over both of its providers that speak to such a server: each task says how it went.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.JUDGE_URL + "/v1";
const name = process.env.JUDGE_MODEL;
const compatible = createOpenAICompatible({ name: "headrace", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = { compatible: compatible(name), openai: openai.chat(name) };
const order = z.object({ city: z.string().max(12), unit: z.enum(["C", "F"]) });
const weather = tool({ description: "The weather in a city", inputSchema: order });
const common = { prompt: "Say hi", temperature: 0, maxRetries: 0 };

function assert(truth, what) {
  if (!truth) throw new Error(what);
}

const tasks = {
  async text(model) {
    const answer = await generateText({ ...common, model, maxOutputTokens: 8 });
    assert(answer.text.length > 0 && answer.usage.outputTokens > 0, JSON.stringify(answer.usage));
  },
  async stream(model) {
    const whole = await generateText({ ...common, model, maxOutputTokens: 16 });
    let text = "";
    const streamed = streamText({ ...common, model, maxOutputTokens: 16 });
    for await (const part of streamed.textStream) text += part;
    assert(text === whole.text, `${text} is not ${whole.text}`);
    assert((await streamed.usage).outputTokens === whole.usage.outputTokens, "usage");
  },
  async tools(model) {
    const asked = { ...common, model, tools: { weather }, toolChoice: "required", maxOutputTokens: 120 };
    const [call] = (await generateText(asked)).toolCalls;
    assert(["C", "F"].includes(call.input.unit), JSON.stringify(call));
    const [streamed] = await streamText(asked).toolCalls;
    assert(["C", "F"].includes(streamed.input.unit), JSON.stringify(streamed));
  },
  async object(model) {
    const { object } = await generateObject({ ...common, model, schema: order, maxOutputTokens: 120 });
    assert(["C", "F"].includes(object.unit), JSON.stringify(object));
  },
  async errors(model) {
    let error = null;
    await generateText({ ...common, model, prompt: "word ".repeat(20_000) }).catch((fault) => (error = fault));
    assert(error?.statusCode === 400 && /maximum context length/.test(error.message), String(error));
  },
};

for (const [provider, model] of Object.entries(models)) {
  for (const [check, task] of Object.entries(tasks)) {
    try {
      await task(model);
      console.log(JSON.stringify({ check: `${provider}_${check}`, ok: true, why: "" }));
    } catch (fault) {
      console.log(JSON.stringify({ check: `${provider}_${check}`, ok: false, why: String(fault).slice(0, 400) }));
    }
  }
}
