// Numbers as people read them. Every value also stands in full in a title, so that nothing is lost to rounding.
"use strict";

const format = {
  bytes(value) {
    if (value == null) return "-";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let at = 0;
    while (value >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
    return (at === 0 ? value.toFixed(0) : value.toPrecision(3)) + " " + units[at];
  },
  seconds(value) {
    if (value == null) return "-";
    if (value === 0) return "0 s";
    if (value < 999.5e-6) return (value * 1e6).toPrecision(value < 1e-6 ? 1 : 3) + " us";
    if (value < 0.9995) return (value * 1e3).toPrecision(3) + " ms";
    if (value < 99.95) return value.toPrecision(3) + " s";
    const whole = Math.round(value);
    return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s`
      : `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  },
  count: (value) => value == null ? "-" : Math.round(value).toLocaleString("en"),
  rate: (value) => value == null ? "-" : value.toPrecision(value >= 100 ? Math.ceil(Math.log10(value + 1)) : 3),
  share: (value) => value == null ? "-" : (value * 100).toFixed(value < 0.0995 ? 1 : 0) + " %",
  clock: (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB"),
};
