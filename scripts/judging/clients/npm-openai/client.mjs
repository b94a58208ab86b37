// OpenAI's npm client: each task says on a JSON line how it went.
import OpenAI from "openai";

const model = process.env.JUDGE_MODEL;
const client = new OpenAI({ baseURL: process.env.JUDGE_URL + "/v1", apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Say hi" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather in a city", parameters } }];

function assert(truth, what) {
  if (!truth) throw new Error(what);
}

const tasks = {
  async models() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert(names.includes(model), `no ${model} in ${names}`);
    assert((await client.models.retrieve(model)).id === model, "retrieve");
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 8 });
    assert(typeof answer.choices[0].message.content === "string", "content");
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    assert(total_tokens === prompt_tokens + completion_tokens, "usage");
  },
  async stream() {
    const asked = { model, messages, max_tokens: 16, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    let usage = null;
    const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text === whole.choices[0].message.content, `${text} is not ${whole.choices[0].message.content}`);
    assert(usage.completion_tokens === whole.usage.completion_tokens, "usage");
  },
  async tools() {
    const asked = { model, messages, tools, max_tokens: 120, temperature: 0 };
    for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
      const answer = await client.chat.completions.create({ ...asked, tool_choice });
      const [call] = answer.choices[0].message.tool_calls;
      assert(["C", "F"].includes(JSON.parse(call.function.arguments).unit), call.function.arguments);
      assert(answer.choices[0].finish_reason === "tool_calls", answer.choices[0].finish_reason);
      const follow = [...messages, answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
      await client.chat.completions.create({ model, messages: follow, tools, max_tokens: 5 });
    }
  },
  async stream_helper() {
    const asked = { model, messages, tools, tool_choice: "required", max_tokens: 120, temperature: 0 };
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city !== undefined, "arguments");
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: parameters } };
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 120, temperature: 0 });
    assert(["C", "F"].includes(JSON.parse(answer.choices[0].message.content).unit), answer.choices[0].message.content);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "One two", max_tokens: 4, logprobs: 1, echo: true });
    assert(answer.choices[0].text.startsWith("One two"), answer.choices[0].text);
    assert(answer.choices[0].logprobs.token_logprobs[0] === null, "first log-probability");
  },
  async errors() {
    const long = [{ role: "user", content: "word ".repeat(20_000) }];
    for (const [fields, kind] of [
      [{ model: "nobody" }, OpenAI.NotFoundError],
      [{ temperature: 9 }, OpenAI.BadRequestError],
      [{ messages: long }, OpenAI.BadRequestError],
    ]) {
      let error = null;
      await client.chat.completions.create({ model, messages, max_tokens: 4, ...fields }).catch((fault) => (error = fault));
      assert(error instanceof kind, `${JSON.stringify(fields).slice(0, 60)} gave ${error}`);
      assert(error.requestID, "request id");
    }
  },
  async abort() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 500, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
  },
  async many_at_once() {
    const asked = { model, messages, max_tokens: 6 };
    const answers = await Promise.all(Array.from({ length: 8 }, () => client.chat.completions.create(asked)));
    assert(answers.every((answer) => answer.choices.length === 1), "choices");
  },
};

for (const [check, task] of Object.entries(tasks)) {
  try {
    await task();
    console.log(JSON.stringify({ check, ok: true, why: "" }));
  } catch (fault) {
    console.log(JSON.stringify({ check, ok: false, why: String(fault).slice(0, 400) }));
  }
}
