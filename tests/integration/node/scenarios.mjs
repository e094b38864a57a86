// OpenAI's own JavaScript client against a real pool. Prints one line of JSON for each scenario.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none-needed", maxRetries: 0 });
const hi = [{ role: "user", content: "hi" }];
const model = "scripted";

const scenarios = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages: hi, max_tokens: 5, seed: 3 });
    return { text: answer.choices[0].message.content, usage: answer.usage.completion_tokens, id: !!answer._request_id };
  },
  async chat_stream() {
    const stream = await client.chat.completions.create({
      model, messages: hi, max_tokens: 5, seed: 3, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null, roles = 0;
    for await (const chunk of stream) {
      if (chunk.choices.length) {
        text += chunk.choices[0].delta.content ?? "";
        roles += chunk.choices[0].delta.role === "assistant" ? 1 : 0;
      }
      usage = chunk.usage ?? usage;
    }
    return { text, usage: usage.completion_tokens, roles };
  },
  async choices() {
    const answer = await client.chat.completions.create({ model, messages: hi, max_tokens: 5, seed: 3, n: 3 });
    return { indices: answer.choices.map((choice) => choice.index), different: new Set(answer.choices.map((c) => c.message.content)).size };
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 4, seed: 9 });
    return { texts: answer.choices.map((choice) => choice.text) };
  },
  async completion_stream() {
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt: "a", max_tokens: 4, seed: 9, stream: true }))
      text += chunk.choices[0].text;
    return { text };
  },
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    return { ids, one: (await client.models.retrieve(model)).id };
  },
  async not_found() {
    try {
      await client.chat.completions.create({ model: "nope", messages: hi });
    } catch (problem) {
      return { class: problem.constructor.name, status: problem.status, code: problem.code, param: problem.param };
    }
  },
  async bad_request() {
    try {
      await client.chat.completions.create({ model, messages: [], stream: true });
    } catch (problem) {
      return { class: problem.constructor.name, status: problem.status, param: problem.param };
    }
  },
  async error_in_a_stream() {
    let chunks = 0;
    try {
      const said = [{ role: "user", content: "@fail=3" }];
      for await (const _ of await client.chat.completions.create({ model, messages: said, stream: true })) chunks += 1;
    } catch (problem) {
      return { chunks, class: problem.constructor.name };
    }
  },
  async timeout() {
    try {
      await client.chat.completions.create({ model, messages: hi, max_tokens: 5000 }, { timeout: 300 });
    } catch (problem) {
      return { class: problem.constructor.name };
    }
  },
  async leaves() {
    const stream = await client.chat.completions.create({ model, messages: hi, max_tokens: 5000, stream: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 3) break;
    return { chunks };
  },
  async many_at_once() {
    const answers = await Promise.all(Array.from({ length: 32 }, (_, i) =>
      client.chat.completions.create({ model, messages: [{ role: "user", content: `@say=answer_${i}` }], max_tokens: 50 })));
    return { own: answers.every((answer, i) => answer.choices[0].message.content === `answer ${i}`) };
  },
  async raw() {
    const { data, response } = await client.chat.completions
      .create({ model, messages: hi, max_tokens: 2 }, { headers: { "X-Request-Id": "mine-5" } }).withResponse();
    return { id: response.headers.get("x-request-id"), role: data.choices[0].message.role };
  },
};

for (const [name, run] of Object.entries(scenarios)) {
  let result;
  try {
    result = await run();
  } catch (problem) {
    result = { unexpected: String(problem) };
  }
  console.log(JSON.stringify({ name, result }));
}
