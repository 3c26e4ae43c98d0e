import { MainAreaWidget, ReactWidget } from '@jupyterlab/apputils';
import type { Message } from '@lumino/messaging';
import React from 'react';
import { checkpointIcon } from '../../ui/icons';
import { type IView, View } from './view';

/** Interval at which ages are updated. */
const AGE_MS = 30_000;

/**
 * The view of checkpoints in the main area; it requests nothing from the server while it is hidden.
 */
export class CheckpointsWidget extends MainAreaWidget<CheckpointsContent> {
  constructor(view: IView) {
    super({ content: new CheckpointsContent(view) });
    this.id = 'jupyter-sing-checkpoints';
    this.title.label = view.trans.__('Checkpoints');
    this.title.caption = view.trans.__('Saved notebooks');
    this.title.icon = checkpointIcon;
    this.toolbar.hide();
  }
}

class CheckpointsContent extends ReactWidget {
  constructor(private readonly _view: IView) {
    super();
    this.addClass('jp-Sing-checkpointsContent');
    this._view.store.changed.connect(this.update, this);
    this._view.notebooks.changed.connect(this.update, this);
    document.addEventListener('visibilitychange', this._updateVisibility);
  }

  override dispose(): void {
    document.removeEventListener('visibilitychange', this._updateVisibility);
    window.clearInterval(this._ages);
    this._view.store.isWatched = false;
    this._view.store.changed.disconnect(this.update, this);
    this._view.notebooks.changed.disconnect(this.update, this);
    super.dispose();
  }

  protected render(): React.JSX.Element {
    return <View {...this._view} />;
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    this._updateVisibility();
  }

  protected override onBeforeDetach(msg: Message): void {
    super.onBeforeDetach(msg);
    this._watch(false);
  }

  protected override onAfterShow(_: Message): void {
    this._updateVisibility();
  }

  protected override onAfterHide(_: Message): void {
    this._watch(false);
  }

  /** Called by the widget that contains it, when that is activated. */
  protected override onActivateRequest(_: Message): void {
    const first = this.node.querySelector<HTMLElement>('tr[tabindex="0"]');
    (first ?? this.node).focus();
  }

  private readonly _updateVisibility = () => this._watch(this.isVisible && !document.hidden);

  private _watch(watched: boolean): void {
    window.clearInterval(this._ages);
    if (watched) {
      this._ages = window.setInterval(() => this.update(), AGE_MS);
      this.update();
    }
    this._view.store.isWatched = watched;
  }

  private _ages: number | undefined;
}
