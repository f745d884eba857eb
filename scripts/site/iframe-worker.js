// Lets the search run on a page opened from a disk. Browsers start no Worker from file: addresses, so the
// worker's script runs in a hidden frame instead. Elsewhere nothing is replaced.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.src = new URL(address, document.baseURI).href;
          script.onload = resolve;
          script.onerror = reject;
          inner.document.body.append(script);
        });
      inner.importScripts = (...addresses) => addresses.reduce((done, one) => done.then(() => load(one)), Promise.resolve());
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
