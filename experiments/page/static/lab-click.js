// The nearest peer, or else the nearest link, that a click has hit, in pixels.
const {x_range, y_range, inner_width, inner_height} = plot;
const to_x = x => (x - x_range.start) / (x_range.end - x_range.start) * inner_width;
const to_y = y => (y - y_range.start) / (y_range.end - y_range.start) * inner_height;
const x = to_x(cb_obj.x), y = to_y(cb_obj.y);
let least = 6 + (peers.data.size[0] ?? 0) / 2, hit = null;
peers.data.peer.forEach((peer, i) => {
    const distance = Math.hypot(to_x(peers.data.x[i]) - x, to_y(peers.data.y[i]) - y);
    if (distance < least) { least = distance; hit = [peer, ""]; }
});
if (hit == null) {
    least = 7;
    const data = links.data;
    data.a.forEach((a, i) => {
        const x0 = to_x(data.x0[i]), y0 = to_y(data.y0[i]);
        const dx = to_x(data.x1[i]) - x0, dy = to_y(data.y1[i]) - y0;
        const along = Math.min(Math.max(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0), 1);
        const distance = Math.hypot(x0 + along * dx - x, y0 + along * dy - y);
        if (distance < least) { least = distance; hit = [a, data.b[i]]; }
    });
}
if (hit != null) clicks.data = {a: [hit[0]], b: [hit[1]], count: [clicks.data.count[0] + 1]};
