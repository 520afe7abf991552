/*
Polls `/status` and draws the answer. Rates and latencies are those between two answers.

Short names of the status document, which a test looks for: p process or positions, v volume,
c counters or calls, s store, k cache, e end of links, j connection, l link.

Invariants: text of the answer goes through `escape` before it becomes HTML. No element gets a style
of its own, which the server's content security policy would refuse.

Not here: what the numbers mean (`status.rs`), how they look (`style.css`).
*/
'use strict';

/* How many answers a chart shows. */
const KEEP = 120;
/* The width and height of a chart, in units of its drawing. */
const SPARK_WIDTH = 240;
const SPARK_HEIGHT = 54;
const STATES = {
  serving: ['', 'serving'],
  store_unavailable: ['warn', 'store unavailable'],
  fenced: ['bad', 'fenced'],
  failed: ['bad', 'failed'],
  closed: ['warn', 'closed'],
};

/* What the charts show, by the volume's id. */
const history = new Map();
/* The previous answer, and when it came. */
let before = null;
let beforeAt = 0;

/* Numbers as text */

const escape = text => String(text).replace(/[&<>"']/g, ch => '&#' + ch.charCodeAt(0) + ';');

function bytes(n) {
  const names = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
  let i = 0;
  while (n >= 1024 && i < names.length - 1) {
    n /= 1024;
    i++;
  }
  const decimals = i === 0 || n >= 100 ? 0 : n >= 10 ? 1 : 2;
  return n.toFixed(decimals) + ' ' + names[i];
}

function count(n) {
  if (n >= 1e6) return (n / 1e6).toFixed(2) + ' M';
  if (n >= 1e4) return (n / 1e3).toFixed(1) + ' k';
  return String(Math.round(n));
}

function micros(us) {
  if (us >= 1e6) return (us / 1e6).toFixed(1) + ' s';
  if (us >= 1e3) return (us / 1e3).toFixed(1) + ' ms';
  return Math.round(us) + ' µs';
}

function age(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return seconds + ' s';
  if (seconds < 3600) return Math.floor(seconds / 60) + ' min';
  if (seconds < 86400) return (seconds / 3600).toFixed(1) + ' h';
  return (seconds / 86400).toFixed(1) + ' d';
}

/* A part of a whole in percent; of nothing it is zero. */
const percent = (part, whole) => whole ? 100 * part / whole : 0;

/* What happened between two answers */

/* The bound in µs under which `share` of the new entries of a histogram lie. */
function quantile(now, old, share) {
  const fresh = now.map((n, i) => n - ((old && old[i]) || 0));
  const total = fresh.reduce((a, b) => a + b, 0);
  if (!total) return 0;
  let seen = 0;
  for (let i = 0; i < fresh.length; i++) {
    seen += fresh[i];
    if (seen >= total * share) return 2 ** i;
  }
  return 0;
}

/* The sums over the operations with these names. */
function operations(v, names) {
  const sum = { requests: 0, bytes: 0, latency: [] };
  for (const one of v.operations.filter(one => names.includes(one.operation))) {
    sum.requests += one.requests;
    sum.bytes += one.bytes;
    one.latency.buckets_us_log2.forEach((n, i) => {
      sum.latency[i] = (sum.latency[i] || 0) + n;
    });
  }
  sum.latency = Array.from(sum.latency, n => n || 0);
  return sum;
}

/* Adds what happened since the old answer to the volume's series, and returns those. */
function remember(v, old, seconds) {
  const none = {
    readIops: [], writeIops: [], readRate: [], writeRate: [], readLatency: [], writeLatency: [],
  };
  const series = history.get(v.id) || none;
  history.set(v.id, series);
  if (!old || !(seconds > 0)) return series;
  const put = (name, value) => {
    series[name].push(Math.max(0, value));
    if (series[name].length > KEEP) series[name].shift();
  };
  for (const kind of ['read', 'write']) {
    const now = operations(v, [kind]), past = operations(old, [kind]);
    put(kind + 'Iops', (now.requests - past.requests) / seconds);
    put(kind + 'Rate', (now.bytes - past.bytes) / seconds);
    put(kind + 'Latency', quantile(now.latency, past.latency, 0.99));
  }
  return series;
}

/* Pieces that several cards have */

const row = (...cells) => `<tr>${cells.map(cell => `<td>${cell}</td>`).join('')}</tr>`;
const heads = (...cells) => `<tr>${cells.map(cell => `<th>${cell}</th>`).join('')}</tr>`;
const table = (...rows) => `<table>${rows.join('')}</table>`;
const key = (color, name) => `<span class="key ${color}"></span>${name}`;
const state = (tone, word) => `<span class="state ${tone}">${word}</span>`;

/* A bar of parts, each a share in percent with its color. */
function bar(...parts) {
  let x = 0;
  const drawn = parts.map(([share, color]) => {
    const rect = `<rect x="${x}" width="${share}" height="1" fill="var(--${color})"/>`;
    x += share;
    return rect;
  });
  return `<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none">${drawn.join('')}</svg>`;
}

/* A piece of a circle; a full turn is 1. */
function arc(from, to, radius) {
  const at = turn => {
    const angle = 2 * Math.PI * turn;
    const x = 60 + radius * Math.sin(angle), y = 60 - radius * Math.cos(angle);
    return `${x.toFixed(2)} ${y.toFixed(2)}`;
  };
  const large = to - from > 0.5 ? 1 : 0;
  return `M${at(from)}A${radius} ${radius} 0 ${large} 1 ${at(to)}`;
}

/* A chart of some series; below it, the newest value of each. */
function spark(title, series, show) {
  const top = Math.max(1, ...series.flatMap(one => one.data));
  const lines = series.map(one => {
    const points = one.data.map((n, i) => {
      const x = SPARK_WIDTH - (one.data.length - 1 - i) * SPARK_WIDTH / (KEEP - 1);
      const y = SPARK_HEIGHT - 2 - n / top * (SPARK_HEIGHT - 6);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    return `<polyline points="${points.join(' ')}" fill="none" stroke="var(--${one.name})"
      stroke-width="1.5" stroke-linejoin="round"/>`;
  });
  const now = series.map(one =>
    `<span>${key(one.name, one.name)} <b>${show(one.data.at(-1) || 0)}</b></span>`);
  const size = `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, ground = SPARK_HEIGHT - 1;
  return `<div><h3>${title}</h3>
    <svg class="spark" viewBox="${size}" preserveAspectRatio="none">
    <line x1="0" y1="${ground}" x2="${SPARK_WIDTH}" y2="${ground}" stroke="var(--line)"/>
    ${lines.join('')}</svg>
    <div class="now">${now.join('')}</div></div>`;
}

/* The card of a volume */

/* The journal as the ring it is: a full turn is its capacity; writes are added clockwise. */
function ring(v) {
  const p = v.positions, turn = v.journal_bytes || 1;
  const stroke = (from, to, color) => {
    const length = Math.min((to - from) / turn, 0.9999);
    if (length <= 0) return '';
    const start = (from / turn) % 1;
    return `<path d="${arc(start, start + Math.max(length, 0.004), 50)}" fill="none"
      stroke="var(--${color})" stroke-width="11"/>`;
  };
  const head = (p.accepted / turn) % 1;
  const safe = Math.min(p.stored, p.logged), waiting = Math.max(0, p.accepted - p.stored);
  return `<svg class="ring" viewBox="0 0 120 120" role="img" aria-label="journal ring">
    <circle cx="60" cy="60" r="50" fill="none" stroke="var(--free)" stroke-width="11"/>
    ${stroke(Math.min(p.stored, p.accepted), Math.min(p.logged, p.accepted), 'logged')}
    ${stroke(Math.max(p.logged, safe), p.accepted, 'accepted')}
    <path d="${arc(head, head + 0.001, 50)}" stroke="var(--ink)" stroke-width="15"/>
    <text x="60" y="60">${bytes(waiting)}</text>
    <text class="small" x="60" y="71">not yet stored</text>
    <text class="small" x="60" y="81">of ${bytes(v.journal_bytes)}</text></svg>`;
}

function positions(v) {
  const p = v.positions;
  const line = (name, at) => {
    const lag = p.accepted - at;
    return row(key(name, name), bytes(at), lag > 0 ? '−' + bytes(lag) : '=');
  };
  return table(line('accepted', p.accepted), line('logged', p.logged), line('stored', p.stored));
}

function sources(v) {
  const c = v.counters, total = c.reads_journal + c.reads_cache + c.reads_store;
  const parts = [
    ['journal', c.reads_journal, 'logged'],
    ['read cache', c.reads_cache, 'stored'],
    ['store', c.reads_store, 'read'],
  ];
  const line = ([name, n, color]) =>
    row(key(color, name), count(n), (total ? percent(n, total).toFixed(1) : 0) + ' %');
  return `<div><h3>where reads came from</h3>
    ${bar(...parts.map(([, n, color]) => [percent(n, total), color]))}
    ${table(...parts.map(line))}</div>`;
}

function numbers(v) {
  const c = v.counters;
  const stored = c.written_bytes ? (c.segment_bytes_stored / c.written_bytes).toFixed(2) : '–';
  const rows = table(
    row('live', bytes(v.live_bytes) + ' of ' + bytes(v.size_bytes)),
    row('data in segments', bytes(v.segment_data_bytes)),
    row('in the store', bytes(v.segment_object_bytes)),
    row('segments, extents', count(v.segments) + ', ' + count(v.extents)),
    row('memory of the map', bytes(v.map_bytes)),
    v.map_groups_unloaded ? row('groups of the map to load', count(v.map_groups_unloaded)) : '',
    row('stored per byte written', stored),
    row('coalesced', bytes(c.coalesced_bytes)),
    row('uploads in flight', v.uploads_in_flight),
    row('writes that waited', count(c.writes_stalled)),
  );
  return `<div><h3>in the store</h3>${rows}</div>`;
}

/* What kind of device it is, in a few words. */
function kind(v) {
  const clients = v.clients.length;
  const words = [bytes(v.size_bytes), 'flush = ' + escape(v.flush), 'epoch ' + v.epoch];
  if (v.read_only) words.push('read-only');
  words.push(`${clients} client${clients === 1 ? '' : 's'}`);
  return words.join(' · ');
}

function volume(v, series) {
  const [tone, word] = STATES[v.health.state] || ['bad', escape(v.health.state)];
  const reason = v.health.reason ? `<p class="why">${escape(v.health.reason)}</p>` : '';
  const chart = (title, what, show) => spark(title, [
    { name: 'read', data: series['read' + what] },
    { name: 'write', data: series['write' + what] },
  ], show);
  return `<section><div class="top"><h2>${escape(v.name)}</h2>${state(tone, word)}
    <span class="note">${kind(v)}</span>
    <code>${v.uris.map(escape).join(' ')}</code></div>${reason}
    <div class="grid"><div><h3>journal</h3>${ring(v)}${positions(v)}</div>
    <div class="charts">
    ${chart('requests per second', 'Iops', count)}
    ${chart('bytes per second', 'Rate', bytes)}
    ${chart('latency, 99 of 100 under', 'Latency', micros)}
    ${sources(v)}${numbers(v)}</div></div></section>`;
}

/* The cards of a store, of the read cache, and of links */

function store(s) {
  const line = (name, c) => {
    const under = share => micros(quantile(c.latency.buckets_us_log2, null, share));
    const moved = bytes(c.bytes_out + c.bytes_in);
    return row(name, count(c.requests), count(c.errors), moved, under(0.5), under(0.99));
  };
  const since = s.unavailable_since_unix_ms;
  const answers = since ? state('warn', 'failing for ' + age(Date.now() - since))
    : state('', 'answers');
  const error = s.last_error ? `<p class="note">last error: ${escape(s.last_error)}</p>` : '';
  const calls = table(
    heads('call', 'requests', 'errors', 'bytes', 'half under', '99 of 100 under'),
    line('get', s.get), line('put', s.put), line('list', s.list), line('delete', s.delete),
  );
  return `<section><div class="top"><h2>store</h2>${answers}<code>${escape(s.url)}</code></div>
    ${calls}${error}</section>`;
}

function cache(k) {
  if (!k) return '';
  const asked = k.hits + k.misses, filled = percent(k.frames, k.cells);
  const hits = asked ? percent(k.hits, asked).toFixed(1) + ' % of ' + count(asked) : '–';
  const off = k.insertion_off
    ? `<p class="why">nothing is inserted: ${escape(k.insertion_off)}</p>` : '';
  const rows = table(
    row('filled', bytes(k.bytes) + ', ' + Math.round(filled) + ' %'),
    row('hits', hits),
    row('frames inserted, evicted', count(k.inserted) + ', ' + count(k.evicted)),
    row('memory of the index', bytes(k.memory_bytes)),
  );
  return `<section><div class="top"><h2>read cache</h2></div>
    ${bar([filled, 'stored'])}${rows}${off}</section>`;
}

/* The byte-granular cache of an end of links. */
function pages(k) {
  const written = bytes(k.written_by_user_bytes) + ', ' + count(k.partial_writes);
  const rows = table(
    row('not at the target yet', bytes(k.dirty_bytes)),
    row('written', written + ' parts of pages'),
    row('sent', bytes(k.sent_bytes)),
    row('saved', bytes(k.saved_bytes)),
    row('fetched', bytes(k.fetched_bytes)),
  );
  return `<h3>cache</h3>${rows}`;
}

/* Links of an end; rates are those since the old answer. */
function links(e, old, seconds) {
  if (!e) return '';
  const pastOf = (j, l) => old && old.connections.find(one => one.id === j.id)
    ?.links.find(one => one.link === l.link);
  const rate = (now, then) => then === undefined || !(seconds > 0) ? '–'
    : bytes(Math.max(0, now - then) / seconds) + '/s';
  const tones = { open: '', silent: 'warn' };
  const line = (j, l) => {
    const past = pastOf(j, l);
    return row(
      escape(j.peer) + ' · ' + escape(l.address ?? l.link),
      state(tones[l.state] ?? 'bad', escape(l.state)) + ' ' + age(l.state_ms),
      rate(l.sent_bytes, past?.sent_bytes),
      rate(l.received_bytes, past?.received_bytes),
      count(l.lost_packets),
      count(l.sent_again),
      micros(l.rtt_us),
      `${j.places - j.places_free} of ${j.places}`,
    );
  };
  const lines = e.connections.flatMap(j => j.links.map(l => line(j, l)));
  if (!lines.length) lines.push(row('nobody is connected'));
  const head = heads('peer', 'state', 'sends', 'receives', 'lost', 'sent again', 'round trip',
    'places in use');
  return `<section><div class="top"><h2>links</h2><span class="note">${escape(e.kind)}</span>
    <code>${escape(e.name)}</code></div>
    ${table(head, ...lines)}${e.cache ? pages(e.cache) : ''}</section>`;
}

/* Asks, draws, and asks again a second later. */
async function tick() {
  const title = document.getElementById('process');
  try {
    const answer = await fetch('status', { cache: 'no-store' });
    const p = await answer.json();
    const now = performance.now(), seconds = (now - beforeAt) / 1000;
    const past = v => before && before.volumes.find(old => old.id === v.id);
    const cards = [
      ...p.volumes.map(v => volume(v, remember(v, past(v), seconds))),
      links(p.link, before && before.link, seconds),
      ...p.stores.map(store),
      cache(p.cache),
    ];
    document.getElementById('main').innerHTML = cards.join('');
    title.textContent = `version ${p.version} · pid ${p.pid} · up ${age(p.uptime_ms)}`;
    before = p;
    beforeAt = now;
  } catch (error) {
    title.textContent = 'no answer: the process may have ended';
  }
  setTimeout(tick, 1000);
}

tick();
