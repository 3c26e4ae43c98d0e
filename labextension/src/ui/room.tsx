import * as React from 'react';

/**
 * Makes a `jp-SingRoom` as wide as the widest of some texts, so that its neighbours do not move
 * when another of these texts is shown. Hidden from view and from screen readers.
 */
export function Room(props: { for: readonly string[] }): React.JSX.Element {
  return (
    <>
      {[...new Set(props.for)].map(each => (
        <span key={each} className="jp-SingRoom-text" aria-hidden="true">
          {each}
        </span>
      ))}
    </>
  );
}
