import type { ISignal } from '@lumino/signaling';
import React, { useEffect, useLayoutEffect, useReducer, useState } from 'react';
import { type ITheme, themeOf } from './theme';

/** Render again after a signal. */
export function useSignal(signal: ISignal<unknown, unknown> | undefined): number {
  const [count, render] = useReducer((before: number) => before + 1, 0);
  useEffect(() => {
    signal?.connect(render);
    return () => {
      signal?.disconnect(render);
    };
  }, [signal]);
  return count;
}

/** Return the size of an element in CSS pixels; 0 before it is known. */
export function useSize(element: React.RefObject<HTMLElement | null>): {
  width: number;
  height: number;
} {
  const [width, setWidth] = useState(0);
  const [height, setHeight] = useState(0);
  useLayoutEffect(() => {
    const { current } = element;
    if (current === null) {
      return undefined;
    }
    const measure = () => {
      setWidth(current.clientWidth);
      setHeight(current.clientHeight);
    };
    const observer = new ResizeObserver(measure);
    observer.observe(current);
    measure();
    return () => observer.disconnect();
  }, [element]);
  return { width, height };
}

/** True if an element is visible, or nearly, at the current scroll position. */
export function useInView(element: React.RefObject<HTMLElement | null>): boolean {
  const [isInView, setInView] = useState(true);
  useEffect(() => {
    const observer = new IntersectionObserver(
      entries => setInView(entries[entries.length - 1].isIntersecting),
      { rootMargin: '100px' }
    );
    observer.observe(element.current!);
    return () => observer.disconnect();
  }, [element]);
  return isInView;
}

/** Return the number of screen pixels per CSS pixel, and render again when it changes. */
export function usePixelRatio(): number {
  const [ratio, setRatio] = useState(window.devicePixelRatio);
  useEffect(() => {
    const query = window.matchMedia(`(resolution: ${ratio}dppx)`);
    const note = () => setRatio(window.devicePixelRatio);
    query.addEventListener('change', note);
    return () => query.removeEventListener('change', note);
  }, [ratio]);
  return ratio;
}

/** Return the theme's colours, read again after the theme has changed. */
export function useTheme(
  element: React.RefObject<HTMLElement | null>,
  changed: ISignal<unknown, unknown> | undefined
): ITheme {
  const count = useSignal(changed);
  const [theme, setTheme] = useState<ITheme>(() => themeOf(document.body));
  useLayoutEffect(() => {
    if (element.current !== null) {
      setTheme(themeOf(element.current));
    }
  }, [element, count]);
  return theme;
}

/**
 * Return the current time, updated regularly.
 *
 * @param seconds - Interval; 0 stops the clock.
 */
export function usePresent(read: () => number, seconds: number): number {
  const [, render] = useReducer((before: number) => before + 1, 0);
  useEffect(() => {
    if (seconds <= 0) {
      return undefined;
    }
    const timer = window.setInterval(render, 1000 * seconds);
    return () => window.clearInterval(timer);
  }, [seconds]);
  return read();
}
