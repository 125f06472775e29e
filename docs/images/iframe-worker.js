// Search in pages that are opened from the disk. Browsers refuse workers there, so the search runs in a hidden frame
// with the same interface. The theme looks for the name IFrameWorker; pages from a server keep real workers.
(() => {
  if (location.protocol !== "file:") return;

  function load(frame, url) {
    return new Promise((done, failed) => {
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = () => failed(new Error(`cannot load ${url}`));
      frame.contentDocument.head.append(script);
    });
  }

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // What a worker's script has: a way to answer, and a way to load more scripts.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const each of urls) await load(this.frame, each);
      };
      this.started = load(this.frame, new URL(url, document.baseURI).href);
    }

    // Messages wait for the script, which listens only once it has run.
    async postMessage(data) {
      await this.started;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
})();
