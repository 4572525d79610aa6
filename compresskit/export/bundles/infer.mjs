// Runs the file of this folder with onnxruntime-web. index.html uses it in a browser; node can import it, too.

export const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array, int8: Int8Array, bool: Uint8Array,
};

/** The arrays of example.json, read from the bytes of example.bin: {name, type, dims, data}. */
export function readArrays(entries, bytes) {
  return entries.map(({ name, type, dims, offset, size }) =>
    ({ name, type, dims, data: new ARRAYS[type](bytes.slice(offset, offset + size)) }));
}

/** Pictures, uint8 (N, height, width, channels), as the network takes them: float32 (N, channels, height, width). */
export function preprocess({ dims: [count, height, width, channels], data }, { mean, std }) {
  const found = new Float32Array(data.length);
  for (let n = 0, i = 0; n < count; n++)
    for (let p = 0; p < height * width; p++)
      for (let c = 0; c < channels; c++, i++)
        found[(n * channels + c) * height * width + p] =
          Math.fround(Math.fround(Math.fround(data[i] / 255) - Math.fround(mean[c])) / Math.fround(std[c]));
  return { type: "float32", dims: [count, channels, height, width], data: found };
}

/** Runs a session on arrays by name; pictures are preprocessed where the file does not do so itself. */
export async function run(ort, session, arrays, settings) {
  const feeds = {};
  for (const array of arrays) {
    const prepared = settings && !settings.in_graph;
    const { type, dims, data } = prepared ? preprocess(array, settings) : array;
    feeds[prepared ? settings.input : array.name] = new ort.Tensor(type, data, dims);
  }
  return session.run(feeds);
}

/** Compares each output on the example with what was computed where the folder was made: [{name, dims, error, largest, agrees}]. */
export async function check(ort, session, example, bytes) {
  const found = await run(ort, session, readArrays(example.inputs, bytes), example.preprocess);
  return readArrays(example.outputs, bytes).map(({ name, dims, data }) => {
    let error = 0, largest = 0;
    data.forEach((wanted, i) => {
      const value = Number(found[name].data[i]);
      error = Math.max(error, Number.isNaN(value) ? Infinity : Math.abs(Number(wanted) - value));
      largest = Math.max(largest, Math.abs(Number(wanted)));
    });
    return { name, dims, error, largest, agrees: error <= 0.01 * largest, data: found[name].data };
  });
}

/** The largest class of each row of an output (N, classes). */
export function classes({ dims: [count, width], data }) {
  return Array.from({ length: count }, (_, n) => {
    const row = Array.from(data.slice(n * width, (n + 1) * width), Number);
    return row.indexOf(Math.max(...row));
  });
}
