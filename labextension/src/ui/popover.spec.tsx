import * as React from 'react';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { place, Popover } from './popover';
import { until } from '../testing/timeouts';

class Choices extends Popover {
  protected content(): React.ReactElement {
    return (
      <>
        <button>first</button>
        <button>last</button>
      </>
    );
  }
}

let anchor: HTMLElement;
let popover: Choices;

beforeEach(() => {
  document.body.innerHTML = '<div id="anchor"><button>open</button></div><input id="other">';
  anchor = document.getElementById('anchor')!;
  popover = new Choices(anchor, 'Choices');
});

afterEach(() => popover.dispose());

function press(key: string, options: KeyboardEventInit = {}): void {
  const target = document.activeElement ?? document.body;
  target.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, ...options }));
}

function focused(): string | null | undefined {
  return document.activeElement?.textContent;
}

async function open(): Promise<void> {
  anchor.querySelector('button')!.focus();
  popover.open();
  await until(() => popover.node.querySelectorAll('button').length === 2);
}

test('the popover is a dialog with the focus, and no button of it has the focus', async () => {
  await open();
  expect(document.activeElement).toBe(popover.node);
  expect(popover.node.getAttribute('role')).toBe('dialog');
  expect(popover.node.getAttribute('aria-label')).toBe('Choices');
});

test('Tab cycles within the popover', async () => {
  await open();
  const went = [];
  for (const shiftKey of [false, false, false, true, true]) {
    press('Tab', { shiftKey });
    went.push(focused());
  }
  expect(went).toEqual(['first', 'last', 'first', 'last', 'first']);
});

test('Shift and Tab enter the popover from its end', async () => {
  await open();
  press('Tab', { shiftKey: true });
  expect(focused()).toBe('last');
});

test('Escape closes the popover, and returns the focus', async () => {
  await open();
  press('Tab');
  press('Escape');
  expect(popover.isOpen).toBe(false);
  expect(focused()).toBe('open');
});

test('the focus returns to the editor', async () => {
  document.getElementById('other')!.focus();
  popover.open();
  press('Escape');
  expect(document.activeElement?.id).toBe('other');
});

test('a click elsewhere closes the popover, and keeps the focus there', async () => {
  await open();
  popover.node.dispatchEvent(new MouseEvent('pointerdown', { bubbles: true }));
  anchor.dispatchEvent(new MouseEvent('pointerdown', { bubbles: true }));
  expect(popover.isOpen).toBe(true);
  document.body.dispatchEvent(new MouseEvent('pointerdown', { bubbles: true }));
  expect(popover.isOpen).toBe(false);
  expect(document.activeElement).toBe(document.body);
});

test('focus elsewhere closes the popover, except in a dialog', async () => {
  await open();
  const dialog = document.createElement('div');
  dialog.innerHTML = '<div class="jp-Dialog"><input id="name"></div>';
  document.body.append(dialog);
  press('Tab');
  document.getElementById('name')!.focus();
  expect(popover.isOpen).toBe(true);
  popover.node.focus();
  document.getElementById('other')!.focus();
  expect(popover.isOpen).toBe(false);
  expect(document.activeElement?.id).toBe('other');
});

test('a disposed popover leaves no elements', async () => {
  await open();
  const toggled = vi.fn();
  popover.toggled.connect(toggled);
  popover.dispose();
  expect(popover.node.isConnected).toBe(false);
  expect(toggled).toHaveBeenCalledTimes(1);
});

const VIEW = { width: 800, height: 600 };
const SIZE = { width: 300, height: 200 };

test.each([
  ['under its anchor', { left: 100, top: 10, bottom: 30 }, SIZE, { left: 100, top: 34 }],
  ['within the window', { left: 700, top: 10, bottom: 30 }, SIZE, { left: 492, top: 34 }],
  ['above, if there is room', { left: 100, top: 560, bottom: 580 }, SIZE, { left: 100, top: 356 }],
  [
    'where there is more room, and smaller, if there is too little',
    { left: -50, top: 400, bottom: 420 },
    { width: 300, height: 900 },
    { left: 8, top: 8, maxHeight: 388 }
  ]
])('is %s', (_, at, size, expected) => {
  expect(place(at, size, VIEW)).toMatchObject(expected);
});
