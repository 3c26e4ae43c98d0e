// Browser interfaces that JupyterLab's packages need and jsdom lacks.
globalThis.DragEvent ??= class extends MouseEvent {} as unknown as typeof DragEvent;
globalThis.ResizeObserver ??= class {
  observe(): void {}
  unobserve(): void {}
  disconnect(): void {}
};
globalThis.matchMedia ??= (query: string) =>
  ({
    matches: false,
    media: query,
    addEventListener: () => undefined,
    removeEventListener: () => undefined,
    addListener: () => undefined, // JupyterLab's buttons use the old names
    removeListener: () => undefined
  }) as unknown as MediaQueryList;
globalThis.requestIdleCallback ??= callback =>
  window.setTimeout(() => callback({ didTimeout: false, timeRemaining: () => 10 }), 0);
globalThis.cancelIdleCallback ??= handle => window.clearTimeout(handle);
