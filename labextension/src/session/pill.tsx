import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { type ISessionContext, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { Message } from '@lumino/messaging';
import type { Widget } from '@lumino/widgets';
import * as React from 'react';
import { pinIcon, stateIcons } from '../ui/icons';
import { contextOf, isUnknown, sessionOf } from '../model/kernels';
import { Popover } from '../ui/popover';
import { fraction } from '../model/progress';
import { ReservedWidth } from '../ui/reservedwidth';
import { StateCard } from './statecard';
import { TRAITS } from '../api/states';
import { CommandIDs, DOMAIN, ISing, type ISingModel, type Session } from '../api/tokens';
import { percentText } from '../text/format';
import { shown, stateSentence, stateWord, unreachableWord } from '../text/words';

/** The pill's name in toolbar settings, see `schema/pill.json`. */
export const PILL = 'sing-state';

/** The longest queue whose number fits into a pill without growing it. */
const QUEUE_MAX = 9;

/**
 * The state of a kernel's session, in the toolbar of its notebook or console; a click opens a
 * popover with the details.
 */
export class Pill extends ReactWidget {
  constructor(private readonly options: Pill.IOptions) {
    super();
    this.addClass('jp-SingPill');
    const { model, context, trans } = options;
    this._popover = new StatePopover(this.node, trans.__('GPU session of this kernel'), options);
    this._popover.toggled.connect(this.update, this);
    model.changed.connect(this.update, this);
    context.kernelChanged.connect(this.update, this);
    context.statusChanged.connect(this.update, this);
    // A change of the connection is the first sign of an unreachable, or restarted, server.
    context.connectionStatusChanged.connect(() => void model.refresh());
  }

  /** Context of the notebook or console to which it belongs. */
  get context(): ISessionContext {
    return this.options.context;
  }

  /** The session that it shows. */
  get session(): Session | undefined {
    return sessionOf(this.options.model, this.options.context);
  }

  /** Open its popover, if there is anything to show. */
  open(): void {
    if (this.isVisible && !isUnknown(this.options.model, this.options.context)) {
      this._popover.open();
    }
  }

  override dispose(): void {
    this._popover.dispose();
    super.dispose();
  }

  protected override render(): React.ReactElement {
    const { model, context, trans } = this.options;
    return (
      <PillButton
        session={this.session}
        isBlank={isUnknown(model, context)}
        isUnreachable={model.isUnreachable}
        isOpen={this._popover.isOpen}
        trans={trans}
        onClick={() => (this._popover.isOpen ? this._popover.dismiss() : this._popover.open())}
      />
    );
  }

  protected override onUpdateRequest(msg: Message): void {
    super.onUpdateRequest(msg);
    if (isUnknown(this.options.model, this.options.context)) {
      this._popover.dismiss();
    }
  }

  protected override onBeforeHide(msg: Message): void {
    this._popover.dismiss(false);
    super.onBeforeHide(msg);
  }

  protected override onBeforeDetach(msg: Message): void {
    this._popover.dismiss(false);
    super.onBeforeDetach(msg);
  }

  private readonly _popover: StatePopover;
}

export namespace Pill {
  export interface IOptions {
    model: ISingModel;
    context: ISessionContext;
    commands: CommandRegistry;
    trans: TranslationBundle;
  }
}

/** Appearance of a pill. */
export function PillButton(props: {
  session: Session | undefined;
  isBlank: boolean;
  isUnreachable: boolean;
  isOpen: boolean;
  trans: TranslationBundle;
  onClick: () => void;
}): React.JSX.Element {
  const { isBlank, isUnreachable, isOpen, trans, onClick } = props;
  const session = isUnreachable ? undefined : props.session;
  const state = isUnreachable ? 'unreachable' : shown(session);
  const word = isUnreachable ? unreachableWord(trans) : stateWord(session, trans);
  const sentence = isUnreachable
    ? trans.__('The Jupyter server does not respond, so the state of this kernel is unknown.')
    : stateSentence(session, trans);
  const Icon = stateIcons[state].react;
  const content = (
    <>
      <Icon tag="span" className="jp-SingPill-icon" />
      <span className="jp-SingReservedWidth">
        <span>{word}</span>
        <ReservedWidth for={allWords(trans)} />
      </span>
      {session?.pinned && <pinIcon.react tag="span" className="jp-SingPill-icon jp-mod-pin" />}
      <PillBar session={session} />
    </>
  );
  if (isBlank) {
    // It keeps its place, so that nothing else moves. It is another element, as toolbars look for
    // focusable elements only when elements are added or removed.
    return (
      <span className="jp-SingPill-button jp-mod-blank" aria-hidden="true">
        {content}
      </span>
    );
  }
  return (
    <button
      type="button"
      className="jp-SingPill-button"
      data-state={state}
      aria-haspopup="dialog"
      aria-expanded={isOpen}
      aria-label={trans.__('%1: GPU session of this kernel', wordAndProgress(word, session, trans))}
      title={isOpen ? undefined : sentence}
      // Like other toolbar buttons, it does not take the focus from where the user types.
      onMouseDown={event => event.preventDefault()}
      onClick={onClick}
    >
      {content}
    </button>
  );
}

/** A thin bar during long work; without a known progress, it is only animated. */
function PillBar({ session }: { session: Session | undefined }): React.JSX.Element | null {
  if (!session || (!session.progress && !TRAITS[session.state].hasBar)) {
    return null;
  }
  const done = fraction(session);
  return (
    <span className="jp-SingPill-bar" aria-hidden="true">
      <span
        className={done === null ? 'jp-mod-indeterminate' : undefined}
        style={done === null ? undefined : { width: `${100 * done}%` }}
      />
    </span>
  );
}

function wordAndProgress(
  word: string,
  session: Session | undefined,
  trans: TranslationBundle
): string {
  const done = fraction(session);
  const state = session?.pinned ? trans.__('%1, stays on GPU', word) : word;
  // While preparing, the word for the state already includes the progress.
  return done === null || session?.state === 'preparing'
    ? state
    : trans.__('%1, %2', state, percentText(done, trans));
}

/** All words that a pill may show: it is as wide as the longest. */
function allWords(trans: TranslationBundle): string[] {
  const states = Object.keys(stateIcons) as (keyof typeof stateIcons)[];
  const words = states
    .filter(state => state !== 'cpu' && state !== 'unreachable')
    .map(state => stateWord({ state, queue_position: QUEUE_MAX } as Session, trans));
  return [...words, stateWord(undefined, trans)];
}

/** Details of a kernel's session. */
class StatePopover extends Popover {
  constructor(
    anchor: HTMLElement,
    label: string,
    private readonly options: Pill.IOptions
  ) {
    super(anchor, label);
  }

  protected override content(): React.ReactElement {
    const { model, context, commands, trans } = this.options;
    return (
      <StateCard
        model={model}
        session={sessionOf(model, context)}
        commands={commands}
        trans={trans}
        onLeave={() => this.dismiss(false)}
      />
    );
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    const { model, context } = this.options;
    model.changed.connect(this.update, this);
    context.kernelChanged.connect(this.update, this);
    this._observing = model.observe();
  }

  protected override onBeforeDetach(msg: Message): void {
    const { model, context } = this.options;
    this._observing?.dispose();
    context.kernelChanged.disconnect(this.update, this);
    model.changed.disconnect(this.update, this);
    super.onBeforeDetach(msg);
  }

  private _observing: { dispose(): void } | undefined;
}

/** Shows the state of their kernels' sessions in the toolbars of notebooks and consoles. */
export const pill: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:pill',
  description:
    'Shows what the session of a kernel does, in the toolbars of notebooks and consoles.',
  autoStart: true,
  requires: [ISing, IToolbarWidgetRegistry],
  optional: [ITranslator],
  activate: (
    app: JupyterFrontEnd,
    { model, settings }: ISing,
    toolbars: IToolbarWidgetRegistry,
    translator: ITranslator | null
  ) => {
    const { commands, shell } = app;
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const pills = new Set<Pill>();
    const create = (panel: Widget): Widget => {
      const context = contextOf(panel);
      if (context === undefined) {
        throw new Error(`${panel.id} has no kernel`);
      }
      const made = new Pill({ model, context, commands, trans });
      made.setHidden(!settings.get('showPill'));
      pills.add(made);
      made.disposed.connect(() => pills.delete(made));
      return made;
    };
    toolbars.addFactory('Notebook', PILL, create);
    toolbars.addFactory('ConsolePanel', PILL, create);
    settings.changed.connect(() =>
      pills.forEach(each => each.setHidden(!settings.get('showPill')))
    );

    /** The pill of a session, else that of the current notebook or console. */
    const find = (session: unknown): Pill | undefined => {
      const here = contextOf(shell.currentWidget);
      return [...pills].find(
        each =>
          !each.isHidden &&
          (typeof session === 'string' ? each.session?.id === session : each.context === here)
      );
    };
    commands.addCommand(CommandIDs.showState, {
      label: trans.__('Show GPU Session of This Kernel'),
      caption: trans.__('Show the state of the GPU session of this kernel, and the reason'),
      isEnabled: args => find(args.session) !== undefined,
      execute: args => find(args.session)?.open()
    });
  }
};
