// Python in the page itself: Pyodide in a worker. See explorer.js for what it must do.
function pyodide(about) {
  let worker = null;
  const python = { seconds: 30, isReady: false, heard: null, start, stop, ask: (key) => worker.postMessage({ key }) };

  // This runs in the worker. All that the interpreter needs lies in the page: what it would fetch is given to it.
  function inWorker() {
    let answer = null;
    async function start({ files, lock, sources, drawn, allocator }) {
      const types = { wasm: "application/wasm", js: "text/javascript" };
      self.fetch = async (address) => {
        const name = String(address).split("/").pop();
        const type = types[name.split(".").pop()] || "application/zip";
        return new Response(files[name], { headers: { "Content-Type": type } });
      };
      for (const name of ["pyodide.js", "pyodide.asm.js"]) {
        importScripts(URL.createObjectURL(new Blob([files[name]], { type: types.js })));
      }
      const python = await self.loadPyodide({ indexURL: "https://in-this-page.invalid/", lockFileContents: lock });
      for (const [path, text] of Object.entries(sources)) {
        python.FS.mkdirTree(`/project/${path}`.replace(/\/[^/]*$/, ""));
        python.FS.writeFile(`/project/${path}`, text);
      }
      python.globals.set("given", python.toPy({ drawn, allocator }));
      answer = python.runPython([
        "import json, sys",
        "from importlib import import_module",
        "sys.path.insert(0, '/project')",
        "from repro.explore.run import answer",
        "first_fit, drawn = import_module(given['allocator']).FirstFitAllocator, json.loads(given['drawn'])",
        "lambda question: answer(question, first_fit, drawn)",
      ].join("\n"));
    }
    self.onmessage = async ({ data }) => {
      try {
        if (data.files) await start(data);
        else self.postMessage({ key: data.key, text: answer(data.key) });
        if (data.files) self.postMessage({ ready: true });
      } catch (error) {
        self.postMessage({ key: data.key, failure: String(error.message || error).trim().split("\n").pop() });
      }
    };
  }

  async function start() {
    const address = URL.createObjectURL(new Blob([`(${inWorker})()`], { type: "text/javascript" }));
    const mine = worker = new Worker(address), names = about.files;
    const contents = await Promise.all(names.map(unpacked)), sources = JSON.parse(await textOf("sources"));
    const files = Object.fromEntries(names.map((name, i) => [name, contents[i]]));
    mine.onerror = (event) => python.heard({ failure: event.message || "the interpreter could not be started" });
    mine.onmessage = ({ data }) => {
      python.isReady ||= Boolean(data.ready);
      python.heard(data);
    };
    if (worker === mine) {
      mine.postMessage({ files, lock: about.lock, sources, drawn: await textOf("drawn"), allocator: about.allocator });
    }
  }

  function stop() {
    worker?.terminate();
    worker = null;
    python.isReady = false;
  }

  return python;
}
