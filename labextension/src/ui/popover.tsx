import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import { type ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import * as React from 'react';

/** Pixels between a popover and its anchor. */
const GAP = 4;
/** Pixels between a popover and the edges of the window. */
const MARGIN = 8;

/** Position of a popover, in pixels of the window. */
export interface IPlace {
  left: number;
  top: number;
  maxHeight: number;
}

/**
 * Find the place for a popover: under its anchor, above it if there is more room, and always within
 * the window.
 */
export function place(
  anchor: Pick<DOMRect, 'left' | 'top' | 'bottom'>,
  size: { width: number; height: number },
  view: { width: number; height: number }
): IPlace {
  const left = Math.max(MARGIN, Math.min(anchor.left, view.width - MARGIN - size.width));
  const below = view.height - MARGIN - (anchor.bottom + GAP);
  const above = anchor.top - GAP - MARGIN;
  if (size.height <= below || below >= above) {
    return { left, top: anchor.bottom + GAP, maxHeight: Math.max(0, below) };
  }
  const height = Math.min(size.height, above);
  return { left, top: anchor.top - GAP - height, maxHeight: above };
}

/**
 * A dialog beside an element, its anchor. It takes the focus, and returns it when it is closed by
 * the keyboard. Escape, a click elsewhere and a focus elsewhere close it; its owner closes it when
 * the anchor disappears.
 */
export abstract class Popover extends ReactWidget {
  /**
   * @param anchor - The element to which it belongs.
   * @param label - Its name for assistive technology.
   */
  constructor(
    private readonly anchor: HTMLElement,
    label: string
  ) {
    super();
    this.addClass('jp-SingPopover');
    // JupyterLab's styles apply only within such a container, and this element is outside of its
    // shell.
    this.addClass('jp-ThemedContainer');
    this.node.setAttribute('role', 'dialog');
    this.node.setAttribute('aria-label', label);
    this.node.tabIndex = -1;
    this._resized = new ResizeObserver(() => this._follow());
  }

  get isOpen(): boolean {
    return this.isAttached;
  }

  /** Emitted when it was opened or closed. */
  get toggled(): ISignal<this, boolean> {
    return this._toggled;
  }

  open(): void {
    if (this.isOpen) {
      return;
    }
    const active = document.activeElement;
    const isSome = active instanceof HTMLElement && active !== document.body;
    this._before = isSome ? active : this.anchor.querySelector('button');
    Widget.attach(this, document.body);
    // Focus the dialog and not one of its buttons: a user who still holds Enter must not press one.
    this.node.focus({ preventScroll: true });
    this._toggled.emit(true);
  }

  /** @param giveBack - Whether to focus the element that was focused before. */
  dismiss(giveBack = true): void {
    if (!this.isOpen) {
      return;
    }
    Widget.detach(this);
    if (giveBack && this._before?.isConnected) {
      this._before.focus({ preventScroll: true });
    }
    this._before = null;
    this._toggled.emit(false);
  }

  override dispose(): void {
    this.dismiss(false);
    super.dispose();
  }

  /** Its content. */
  protected abstract content(): React.ReactElement;

  protected override render(): React.ReactElement {
    return <Measured onRendered={() => this._follow()}>{this.content()}</Measured>;
  }

  handleEvent(event: Event): void {
    switch (event.type) {
      case 'keydown':
        this._onKey(event as KeyboardEvent);
        break;
      case 'focusout': {
        const next = (event as FocusEvent).relatedTarget;
        if (next instanceof Node && !this._isOurs(next)) {
          this.dismiss(false);
        }
        break;
      }
      case 'pointerdown':
        if (!this._isOurs(event.target as Node)) {
          this.dismiss(false);
        }
        break;
      default:
        this._follow();
    }
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    this.node.addEventListener('keydown', this);
    this.node.addEventListener('focusout', this);
    document.addEventListener('pointerdown', this, true);
    window.addEventListener('scroll', this, true);
    window.addEventListener('resize', this);
    // A toolbar's size and position change when a panel beside it is opened.
    const toolbar = this.anchor.closest('.jp-Toolbar');
    [this.anchor, toolbar].forEach(each => each && this._resized.observe(each));
    this._follow();
  }

  protected override onBeforeDetach(msg: Message): void {
    this._resized.disconnect();
    window.removeEventListener('resize', this);
    window.removeEventListener('scroll', this, true);
    document.removeEventListener('pointerdown', this, true);
    this.node.removeEventListener('focusout', this);
    this.node.removeEventListener('keydown', this);
    super.onBeforeDetach(msg);
  }

  private _onKey(event: KeyboardEvent): void {
    if (event.key === 'Escape') {
      event.preventDefault();
      event.stopPropagation();
      this.dismiss();
    } else if (event.key === 'Tab') {
      // The dialog is at the end of the page: without this, the focus would move out of the page.
      const stops = [...this.node.querySelectorAll<HTMLElement>('button, [href]')];
      const at = stops.indexOf(document.activeElement as HTMLElement);
      const next = event.shiftKey ? (at <= 0 ? stops.length : at) - 1 : (at + 1) % stops.length;
      event.preventDefault();
      stops[next]?.focus();
    }
  }

  private _follow(): void {
    const { offsetWidth, offsetHeight, clientHeight, scrollHeight, style } = this.node;
    const { left, top, maxHeight } = place(
      this.anchor.getBoundingClientRect(),
      { width: offsetWidth, height: scrollHeight + offsetHeight - clientHeight },
      { width: window.innerWidth, height: window.innerHeight }
    );
    style.left = `${Math.round(left)}px`;
    style.top = `${Math.round(top)}px`;
    style.maxHeight = `${Math.floor(maxHeight)}px`;
  }

  /**
   * True if a node is in this popover, or in a dialog that was opened from it and returns the
   * focus.
   */
  private _isOurs(node: Node): boolean {
    const element = node instanceof Element ? node : node.parentElement;
    return [this.node, this.anchor].some(each => each.contains(node)) || isInDialog(element);
  }

  private readonly _resized: ResizeObserver;
  private readonly _toggled = new Signal<this, boolean>(this);
  private _before: HTMLElement | null = null;
}

/** Calls back when its children were rendered and can be measured, before they are painted. */
function Measured(props: React.PropsWithChildren<{ onRendered: () => void }>): React.JSX.Element {
  React.useLayoutEffect(props.onRendered);
  return <>{props.children}</>;
}

function isInDialog(element: Element | null): boolean {
  return !!element?.closest('.jp-Dialog');
}
