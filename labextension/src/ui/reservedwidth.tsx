import * as React from 'react';

/**
 * Makes a `jp-SingReservedWidth` as wide as the widest of some texts, so that its neighbours stay
 * in their places when another of these texts is shown. Hidden from view and from screen readers.
 */
export function ReservedWidth(props: { for: readonly string[] }): React.JSX.Element {
  return (
    <>
      {[...new Set(props.for)].map(each => (
        <span key={each} className="jp-SingReservedWidth-text" aria-hidden="true">
          {each}
        </span>
      ))}
    </>
  );
}
