import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import * as React from 'react';
import { checkpointText, neighbours, queueText, shortfallText, withoutTurn } from '../text/facts';
import { checkpointIcon, pinIcon, stateIcons } from '../ui/icons';
import { startedTexts } from '../text/jobs';
import { fraction } from '../model/progress';
import { SessionName } from '../ui/sessionname';
import { ReservedWidth } from '../ui/reservedwidth';
import { CommandIDs, type Device, type ISingModel, type Session } from '../api/tokens';
import { bytesText, occupancyText, percentText } from '../text/format';
import {
  deviceName,
  escaped,
  sentenceBeside,
  sessionName,
  shareText,
  sharingText,
  shown,
  stateSentence,
  stateWord,
  turnText,
  unreachableWord
} from '../text/words';

/** Maximum number of neighbours shown by name. */
const NAMED_MAX = 5;
/** JupyterLab's own command; its panel has our section. */
const SHOW_RUNNING_PANEL = 'running:show-panel';

export interface IStateCardProps {
  model: ISingModel;
  session: Session | undefined;
  commands: CommandRegistry;
  trans: TranslationBundle;
  /** Called before a command that opens another view. */
  onLeave: () => void;
}

/** The state of a kernel's session, the other sessions on its device, and the possible actions. */
export function StateCard(props: IStateCardProps): React.JSX.Element {
  const { model, session, trans } = props;
  const device = model.devices.find(each => each.id === session?.device);
  const state = shown(session);
  const word = stateWord(session, trans);
  if (model.isUnreachable) {
    return <Unreachable trans={trans} />;
  }
  return (
    <div className="jp-SingCard">
      <div className="jp-SingCard-title" data-state={state}>
        <StateIcon session={session} />
        <span>{word}</span>
        {session?.pinned && <span className="jp-SingCard-note">{trans.__('stays on GPU')}</span>}
      </div>
      <p role="status">{standing(session, word, trans)}</p>
      {session && <Started {...{ session, model, trans }} />}
      {session === undefined && <Remedy trans={trans} />}
      {session && (session.shared || session.queue_position != null) && (
        <Turn session={session} trans={trans} />
      )}
      {session && shortfallText(session, trans) && (
        <p className="jp-SingCard-minor">{shortfallText(session, trans)}</p>
      )}
      {session && <Work session={session} trans={trans} />}
      {session && device && <Occupancy {...{ session, device, model, trans }} />}
      {session && (
        <p className="jp-SingCard-minor">
          <checkpointIcon.react tag="span" className="jp-SingCard-icon" />
          {checkpointText(session, new Date(), document.documentElement.lang, trans)}
        </p>
      )}
      {model.problem && (
        <p className="jp-SingCard-minor">
          {trans.__('This may be out of date: %1', model.problem)}
        </p>
      )}
      {session && <Actions {...props} session={session} />}
      <Links {...props} />
    </div>
  );
}

/** Shown while the server does not answer: the session's state is unknown. */
function Unreachable({ trans }: { trans: TranslationBundle }): React.JSX.Element {
  const Icon = stateIcons.unreachable.react;
  return (
    <div className="jp-SingCard">
      <div className="jp-SingCard-title" data-state="unreachable">
        <Icon tag="span" className="jp-SingCard-icon" />
        <span>{unreachableWord(trans)}</span>
      </div>
      <p role="status">
        {trans.__('The Jupyter server does not respond, so the state of this kernel is unknown.')}
      </p>
    </div>
  );
}

function StateIcon({ session }: { session: Session | undefined }): React.JSX.Element {
  const Icon = stateIcons[shown(session)].react;
  return <Icon tag="span" className="jp-SingCard-icon" />;
}

/** Text that stays the same across turns: it is announced by screen readers when it changes. */
function standing(session: Session | undefined, word: string, trans: TranslationBundle): string {
  return session?.shared
    ? sharingText(session.shared, trans)
    : sentenceBeside(word, withoutTurn(stateSentence(session, trans)));
}

function capitalized(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Processes that the kernel has started and that have sessions, whose state is not its own. */
function Started(props: {
  session: Session;
  model: ISingModel;
  trans: TranslationBundle;
}): React.JSX.Element | null {
  const texts = startedTexts(props.session, props.model.sessions, props.trans);
  return texts.length === 0 ? null : (
    <p>{props.trans.__('Started from here: %1', texts.join(' · '))}</p>
  );
}

/** Help for a kernel without a session. */
function Remedy({ trans }: { trans: TranslationBundle }): React.JSX.Element {
  return (
    <p className="jp-SingCard-minor">
      {trans.__(
        'To use a GPU, start or restart a Python kernel. If it still has no GPU session, run "jupyter sing doctor" in a terminal to see what is missing.'
      )}
    </p>
  );
}

/** The session's turn: counts down between two estimates. */
function Turn(props: { session: Session; trans: TranslationBundle }): React.JSX.Element {
  const { session, trans } = props;
  const left = useCountdown(session);
  const place = session.queue_position;
  const next = turnText(place, left, trans);
  const text = session.shared
    ? capitalized([shareText(session.shared, trans), next].join(' · '))
    : place == null
      ? ''
      : queueText(place, left, trans);
  return <p className="jp-SingCard-turn">{text}</p>;
}

/** Seconds left of a session's expected wait. */
function useCountdown(session: Session): number | null {
  const [now, setNow] = React.useState(Date.now);
  // Each update of a session makes a new object, with a new estimate.
  const received = React.useRef({ session, at: now });
  if (received.current.session !== session) {
    received.current = { session, at: Date.now() };
  }
  const counts = session.expected_wait != null;
  React.useEffect(() => {
    const timer = counts ? window.setInterval(() => setNow(Date.now()), 1000) : undefined;
    return () => window.clearInterval(timer);
  }, [counts]);
  return session.expected_wait == null
    ? null
    : session.expected_wait - Math.max(0, now - received.current.at) / 1000;
}

/** Work in progress (save, restore or preparation), and its progress. */
function Work(props: { session: Session; trans: TranslationBundle }): React.JSX.Element | null {
  const { session, trans } = props;
  if (!session.progress) {
    return null;
  }
  const { verb, checkpoint } = session.progress;
  const text = {
    restore: trans.__('Restoring %1', checkpoint),
    checkpoint: trans.__('Saving checkpoint %1', checkpoint),
    prepare: trans.__('Preparing')
  }[verb];
  const done = fraction(session);
  const percent = done === null ? undefined : Math.round(100 * done);
  return (
    <div className="jp-SingCard-work">
      <span>{text}</span>
      <span>{done !== null && percentText(done, trans)}</span>
      <div
        className="jp-SingCard-bar"
        role="progressbar"
        aria-label={text}
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={percent}
      >
        <span className="jp-SingCard-own" style={{ width: `${percent ?? 0}%` }} />
      </div>
    </div>
  );
}

/** Memory use of its device, and the sessions that cause it. */
function Occupancy(props: {
  session: Session;
  device: Device;
  model: ISingModel;
  trans: TranslationBundle;
}): React.JSX.Element {
  const { session, device, model, trans } = props;
  const others = neighbours(session, model.sessions).sort((a, b) =>
    sessionName(a, trans).localeCompare(sessionName(b, trans), undefined, { numeric: true })
  );
  const part = (bytes: number) => `${Math.min(100, (100 * bytes) / device.memory_total)}%`;
  const text = trans.__('%1 on %2', occupancyText(device), deviceName(device.id));
  return (
    <div className="jp-SingCard-device">
      <span title={device.id}>{text}</span>
      {device.failure && <span className="jp-SingCard-minor">{device.failure}</span>}
      <span className="jp-SingCard-minor">
        {session.memory > 0
          ? trans.__('%1 used by this notebook', bytesText(session.memory))
          : trans.__('none used by this notebook')}
      </span>
      <div className="jp-SingCard-bar" role="img" aria-label={text}>
        <span className="jp-SingCard-own" style={{ width: part(session.memory) }} />
        <span
          className="jp-SingCard-others"
          style={{ width: part(Math.max(0, device.memory_used - session.memory)) }}
        />
      </div>
      {others.length > 0 && (
        <ul aria-label={trans.__('Also on %1', deviceName(device.id))}>
          {others.slice(0, NAMED_MAX).map(each => (
            <li key={each.id}>
              <StateIcon session={each} />
              <span className="jp-SingCard-name" title={escaped(each.name)}>
                <SessionName name={sessionName(each, trans)} />
              </span>
              <span className="jp-SingCard-minor">{stateWord(each, trans)}</span>
              <span className="jp-SingCard-minor">{bytesText(each.memory)}</span>
            </li>
          ))}
          {others.length > NAMED_MAX && (
            <li className="jp-SingCard-minor">
              {trans._n(
                'and %1 more',
                'and %1 more',
                others.length - NAMED_MAX,
                others.length - NAMED_MAX
              )}
            </li>
          )}
        </ul>
      )}
    </div>
  );
}

interface IAction {
  command: string;
  label: string;
  /** Other texts of the button, which is as wide as the longest. */
  room?: string[];
  pressed?: boolean;
  /** Why the action is not possible now; empty if it is. */
  why: string;
}

/** Actions on a session; an action that is not possible now shows why. */
function Actions(props: IStateCardProps & { session: Session }): React.JSX.Element | null {
  const { commands, session, trans } = props;
  const reasons = React.useId();
  const [doing, setDoing] = React.useState<ReadonlySet<string>>(new Set());
  const args = { session: session.id };
  const act = async (command: string) => {
    setDoing(before => new Set(before).add(command));
    await execute(commands, command, args);
    setDoing(before => new Set([...before].filter(each => each !== command)));
  };
  const isAway = session.state === 'suspended';
  const [resume, suspend] = [trans.__('Resume now'), trans.__('Suspend')];
  const restore = { command: CommandIDs.restore, label: trans.__('Restore checkpoint…') };
  const usual = [
    isAway
      ? { command: CommandIDs.resume, label: resume, room: [suspend] }
      : { command: CommandIDs.suspend, label: suspend, room: [resume] },
    { command: CommandIDs.pin, label: trans.__('Keep on GPU'), pressed: session.pinned },
    { command: CommandIDs.checkpoint, label: trans.__('Save checkpoint') }
  ];
  const actions: IAction[] = (session.state === 'failed' ? [restore] : usual)
    .filter(each => commands.hasCommand(each.command))
    .map(each => ({
      ...each,
      // The caption of a disabled command says why it is disabled.
      why: commands.isEnabled(each.command, args) ? '' : commands.caption(each.command, args)
    }));
  const whys = [...new Set(actions.map(each => each.why).filter(Boolean))];
  return actions.length === 0 ? null : (
    <>
      <div className="jp-SingCard-actions">
        {actions.map(({ command, label, room, why, pressed }) => {
          const isDisabled = why !== '' || doing.has(command);
          return (
            <button
              // The same button, so that it keeps the focus when its action changes its label.
              key={command === CommandIDs.resume ? CommandIDs.suspend : command}
              type="button"
              className="jp-SingCard-button"
              aria-disabled={isDisabled}
              aria-busy={doing.has(command)}
              aria-pressed={pressed}
              aria-describedby={why ? reasons : undefined}
              title={commands.caption(command, args)}
              onClick={isDisabled ? undefined : () => void act(command)}
            >
              {command === CommandIDs.pin && (
                <pinIcon.react tag="span" className="jp-SingCard-icon" />
              )}
              <span className="jp-SingReservedWidth">
                <span>{label}</span>
                <ReservedWidth for={room ?? []} />
              </span>
            </button>
          );
        })}
      </div>
      {whys.length > 0 && (
        <p id={reasons} className="jp-SingCard-minor">
          {whys.join(' ')}
        </p>
      )}
    </>
  );
}

/** Links to views with more details. */
function Links(props: IStateCardProps): React.JSX.Element {
  const { commands, trans, onLeave } = props;
  const links = [
    [SHOW_RUNNING_PANEL, trans.__('All GPUs…')],
    [CommandIDs.openActivity, trans.__('Activity')],
    [CommandIDs.openCheckpoints, trans.__('Checkpoints')]
  ].filter(([command]) => commands.hasCommand(command));
  const go = (command: string) => {
    onLeave();
    void execute(commands, command);
  };
  return (
    <div className="jp-SingCard-links">
      {links.map(([command, label]) => (
        <button
          type="button"
          key={command}
          className="jp-SingCard-link"
          onClick={() => go(command)}
        >
          {label}
        </button>
      ))}
    </div>
  );
}

/** Execute a command; commands themselves notify the user of failures. */
async function execute(
  commands: CommandRegistry,
  command: string,
  args?: { session: string }
): Promise<void> {
  try {
    await commands.execute(command, args);
  } catch (error) {
    console.warn(`jupyter_sing: ${command} failed`, error);
  }
}
