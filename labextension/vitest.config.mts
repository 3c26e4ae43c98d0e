import { defineConfig } from 'vitest/config';

export default defineConfig({
  // Icons of JupyterLab are files of SVG that its bundler reads as text.
  plugins: [
    {
      name: 'svg-as-text',
      enforce: 'pre',
      transform: (code, id) =>
        id.endsWith('.svg') ? `export default ${JSON.stringify(code)};` : undefined
    }
  ],
  test: {
    environment: 'jsdom',
    include: ['src/**/*.spec.{ts,tsx}'],
    setupFiles: ['src/testing/setup.ts'],
    server: { deps: { inline: [/@jupyterlab/, /@jupyter\/web-components/, /@lumino/] } }
  }
});
