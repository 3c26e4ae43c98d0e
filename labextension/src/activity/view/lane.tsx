import React, { useLayoutEffect, useRef } from 'react';
import { drawAxis, drawLane, type IScene, paint } from './chart';
import { useInView } from './hooks';
import { type ILane } from '../data/layout';
import type { IRange, ITick } from '../data/range';

/** Height of the axis, in pixels. */
export const AXIS_HEIGHT = 28;

interface IPlotProps {
  scene: IScene;
  label: string;
  describedBy: string;
}

/** Plot of one device's activity; the chart around it handles the keys. */
export const Plot = React.memo(function Plot(props: IPlotProps): React.ReactElement {
  const { scene } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const isInView = useInView(canvas);
  useLayoutEffect(() => {
    if (!isInView) {
      return;
    }
    paint(canvas.current!, scene.width, scene.lane.height, context => drawLane(context, scene));
  }, [scene, isInView]);
  return (
    <div
      className="jp-SingActivity-plot"
      tabIndex={0}
      role="application"
      aria-label={props.label}
      aria-describedby={props.describedBy}
      data-device={scene.device.id}
    >
      <canvas ref={canvas} aria-hidden="true" />
    </div>
  );
});

/** The axis of time, which can be moved by keys. */
export function Axis(props: {
  scene: Pick<IScene, 'range' | 'width' | 'theme' | 'ticks' | 'now'>;
  label: (tick: ITick) => string;
  name: string;
  text: string;
  bounds: IRange;
}): React.ReactElement {
  const { scene, bounds } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    paint(canvas.current!, scene.width, AXIS_HEIGHT, context =>
      drawAxis(context, scene, AXIS_HEIGHT, props.label)
    );
  });
  return (
    <div
      className="jp-SingActivity-axis"
      tabIndex={0}
      role="slider"
      aria-label={props.name}
      aria-valuemin={Math.round(bounds.start)}
      aria-valuemax={Math.round(bounds.end)}
      aria-valuenow={Math.round(scene.range.end)}
      aria-valuetext={props.text}
    >
      <canvas ref={canvas} aria-hidden="true" />
    </div>
  );
}

/** Texts beside a device's plot, for a moment. */
export interface IReadout {
  name: string;
  busy: string;
  /** The session that holds the device. */
  holder: React.ReactNode;
  memory: string;
  waiting: string;
}

/** Texts beside a plot, each at the height of the part that it describes. */
export function Gutter(props: {
  lane: ILane;
  icon: React.ReactNode;
  readout: IReadout;
  words: { memory: string; waiting: string };
}): React.ReactElement {
  const { lane, readout, words } = props;
  return (
    <div className="jp-SingActivity-gutter">
      <div className="jp-SingActivity-device" style={{ top: lane.marks }}>
        {props.icon}
        <strong>{readout.name}</strong>
        <span className="jp-SingActivity-number jp-mod-faint">{readout.busy}</span>
      </div>
      <div className="jp-SingActivity-holder" style={{ top: lane.bars }}>
        {readout.holder}
      </div>
      <div className="jp-SingActivity-value" style={{ top: lane.memory }}>
        <span className="jp-mod-faint">{words.memory}</span>
        <span className="jp-SingActivity-number">{readout.memory}</span>
      </div>
      <div className="jp-SingActivity-value" style={{ top: lane.queue }}>
        <span className="jp-mod-faint">{words.waiting}</span>
        <span className="jp-SingActivity-number">{readout.waiting}</span>
      </div>
    </div>
  );
}
