// What is seen of the page of `megacpp report html`: of every element with text of its own its
// place, its size in pixels (in a chart: after scaling), its contrast with what is behind it
// (WCAG 2.2); likewise of curves.
(() => {
  const parse = c => { const p = c.match(/[\d.]+/g).map(Number); return [p[0], p[1], p[2], p[3] ?? 1] };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => { const l = c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05) };
  const canvas = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
  const behind = e => { let all = []; for (; e; e = e.parentElement) all.push(parse(getComputedStyle(e).backgroundColor));
    return all.reverse().reduce((under, c) => over(c, under), canvas) };
  const texts = [...document.querySelectorAll('body *')].filter(e => [...e.childNodes].some(
    n => n.nodeType == 3 && n.data.trim())).map(e => {
    const s = getComputedStyle(e), b = e.getBoundingClientRect(), svg = e.ownerSVGElement;
    const scale = svg ? e.getScreenCTM().a : 1, back = behind(svg ?? e);
    const frame = svg?.getBoundingClientRect();
    const all = document.createRange(); all.selectNodeContents(e);
    return { lines: new Set([...all.getClientRects()].map(r => r.top)).size, text: e.textContent.trim().slice(0, 40), left: b.left, right: b.right, wide: b.width, tall: b.height,
      px: parseFloat(s.fontSize) * scale, contrast: contrast(over(parse(svg ? s.fill : s.color), back), back),
      cut: frame ? b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1 : false,
      scrolls: !!e.closest('.scroll, pre'), halo: !!svg && s.paintOrder.startsWith('stroke') && parseFloat(s.strokeWidth) * scale >= 2
        && over(parse(s.stroke), back).join() == back.join(),
      names: !!e.closest('.runs td:first-child'), cell: e.closest('td')?.getBoundingClientRect().width,
      cropped: e.scrollWidth > e.clientWidth + 1,
      closed: !!e.closest('details:not([open])') && !e.closest('summary') } });
  const curves = [...document.querySelectorAll('polyline, circle')].map(e => {
    const b = e.getBoundingClientRect(), s = getComputedStyle(e), back = behind(e.ownerSVGElement);
    return { wide: b.width, tall: b.height, contrast: contrast(over(parse(s.stroke == 'none' ? s.fill : s.stroke), back), back) } });
  const summary = document.querySelector('.runs .scroll');
  return { texts, curves, summary: summary && summary.scrollWidth - summary.clientWidth, across: document.documentElement.scrollWidth, width: innerWidth, canvas: behind(document.body) };
})()
