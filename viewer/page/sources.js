// Sources (runs, evaluations, single files), their newest file, and the titles of files.

/** The file with the highest step; at the same step, the training file rather than the evaluation. */
export function newestFile(source) {
  const rank = (file) => 2 * (file.step ?? 0) + (file.kind === "train" ? 1 : 0);
  return source.files.reduce((newest, file) => (newest === null || rank(file) > rank(newest) ? file : newest), null);
}

export function sourceOf(site, id) {
  return site.sources.find((source) => source.id === id);
}

/** "step 12", "evaluation at step 30", or the file's name. */
export function fileTitle(file) {
  if (file.step === null || file.kind === "other") return file.name;
  return file.kind === "eval" ? `evaluation at step ${file.step}` : `step ${file.step}`;
}
