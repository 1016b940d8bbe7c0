// A tour of every method of the `ollama` package: its answers as one JSON object on standard output.
// Arguments: the server's URL, a GGUF file's digest in the store, a name that can be pulled.

import { Ollama } from "ollama";

const [host, digest, pullable] = process.argv.slice(2);
const client = new Ollama({ host });
const greedy = { temperature: 0, num_predict: 12 };
const hello = [{ role: "user", content: "Say hello." }];
const weather = [{ role: "user", content: "How is the weather in Paris?" }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

async function pieces(stream) {
  const all = [];
  for await (const piece of await stream) all.push(piece);
  return all;
}

async function aborted() {
  const stream = await client.chat({
    model: "smollm2", messages: hello, stream: true, options: { num_predict: 5000, ignore_eog: true },
  });
  let count = 0;
  try {
    for await (const _ of stream) if (++count === 3) stream.abort();
  } catch (error) {
    return [count, error.name];
  }
  return [count, null];
}

const steps = {
  version: () => client.version(),
  generate: () => client.generate({ model: "smollm2", prompt: "Say hello.", options: greedy }),
  generate_stream: () =>
    pieces(client.generate({ model: "smollm2", prompt: "Say hello.", options: greedy, stream: true })),
  generate_raw: () =>
    client.generate({ model: "smollm2", prompt: "One, two, three, four,", raw: true, options: greedy }),
  generate_logprobs: () =>
    client.generate({ model: "smollm2", prompt: "Say hello.", logprobs: true, top_logprobs: 2, options: greedy }),
  chat: () => client.chat({ model: "smollm2", messages: hello, options: greedy }),
  chat_stream: () => pieces(client.chat({ model: "smollm2", messages: hello, options: greedy, stream: true })),
  aborted,
  tools: () => client.chat({ model: "caller", messages: weather, tools: [tool] }),
  tools_stream: () => pieces(client.chat({ model: "caller", messages: weather, tools: [tool], stream: true })),
  structured: () =>
    client.chat({ model: "smollm2", messages: hello, format: schema, options: { seed: 1, num_predict: 200 } }),
  thinking: () =>
    client.chat({ model: "thinker", messages: [{ role: "user", content: "What is 4 + 4?" }], think: true }),
  no_thinking: () => client.chat({ model: "smollm2", messages: hello, think: true }),
  image: () => client.generate({ model: "smollm2", prompt: "x", images: [new Uint8Array([1, 2, 3])] }),
  embed: () => client.embed({ model: "smollm2", input: ["why is the sky blue?", "hi"], dimensions: 8 }),
  embeddings: () => client.embeddings({ model: "smollm2", prompt: "hi" }),
  list: () => client.list(),
  ps: () => client.ps(),
  show: () => client.show({ model: "caller" }),
  create: () => client.create({ model: "js", from: "smollm2", system: "Be brief." }),
  create_stream: () => pieces(client.create({ model: "js2", files: { "m.gguf": digest }, stream: true })),
  copy: () => client.copy({ source: "js", destination: "js3" }),
  deleted: async () => {
    for (const model of ["js", "js2", "js3"]) await client.delete({ model });
    return (await client.list()).models.map((model) => model.name);
  },
  pull: () => client.pull({ model: pullable, insecure: true }),
  pull_stream: () => pieces(client.pull({ model: pullable, insecure: true, stream: true })),
  pull_missing: () => pieces(client.pull({ model: `${pullable}x`, insecure: true, stream: true })),
  push: () => client.push({ model: "smollm2" }),
  missing: () => client.chat({ model: "nope", messages: hello }),
  unload: () => client.generate({ model: "smollm2", prompt: "", keep_alive: 0 }),
};

const results = {};
for (const [name, step] of Object.entries(steps)) {
  try {
    results[name] = await step();
  } catch (error) {
    results[name] = { error: error.message, status: error.status_code ?? null };
  }
}
console.log(JSON.stringify(results));
