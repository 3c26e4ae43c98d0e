// What JupyterLab's packages expect of a browser and jsdom does not have.
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
    removeEventListener: () => undefined
  }) as unknown as MediaQueryList;
